"""The nameserver daemon: turns broker registrations into routes."""
