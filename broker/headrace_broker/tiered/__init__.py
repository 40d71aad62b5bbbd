"""Tiered storage: queues kept in a cheaper store than the broker's disk."""
