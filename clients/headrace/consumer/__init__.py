"""Receiving: queues by hand, or a group that shares them."""
