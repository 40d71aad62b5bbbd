"""Sending: one message, a batch, or a pipeline of them."""
