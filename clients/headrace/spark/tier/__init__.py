"""Reads of a tier without its broker: locations, spans, and the bytes of messages."""
