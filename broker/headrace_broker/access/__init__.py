"""The rights of clients inside the broker."""
