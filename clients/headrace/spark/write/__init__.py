"""Writes to topics: rows to records, staged at brokers, committed together."""
