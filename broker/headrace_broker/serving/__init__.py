"""Frames of clients, and how the broker fares while it serves them."""
