"""Delayed messages: they wait in a queue for each level until they are due."""
