"""Consumers: of queues assigned by hand, and of queues shared within a group."""
