"""Timers: messages that are delivered at a time that their producer names."""
