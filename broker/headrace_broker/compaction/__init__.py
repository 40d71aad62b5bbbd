"""Compacted topics, which keep the newest message of each key."""
