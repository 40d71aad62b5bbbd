"""Reads of a tier without its broker: places, spans, and the bytes of messages."""
