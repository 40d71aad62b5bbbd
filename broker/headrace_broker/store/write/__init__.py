"""The way of a message: write path, confirmation, flush, takers."""
