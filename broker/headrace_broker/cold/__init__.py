"""Queues whose messages are not in the local log: fetched by the block, and read ahead."""
