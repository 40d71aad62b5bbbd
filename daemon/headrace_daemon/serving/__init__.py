"""Serves the protocol's frames to clients, fairly and in bounds."""
