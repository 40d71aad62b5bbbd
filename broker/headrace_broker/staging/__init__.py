"""Writes kept aside until their batch is decided, then appended once: docs/protocol.md."""
