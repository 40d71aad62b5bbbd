"""Queues assigned by the broker instead of by the members of a group."""
