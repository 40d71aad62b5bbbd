"""Writes kept aside until their micro-batch is decided, then appended once: docs/protocol.md."""
