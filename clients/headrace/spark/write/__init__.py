"""Writes to topics: rows are encoded as records, staged at brokers and committed together."""
