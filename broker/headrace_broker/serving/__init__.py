"""Frames of clients, and the broker's health while it serves them."""
