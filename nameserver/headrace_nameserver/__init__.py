"""The nameserver daemon: broker registrations become routes."""
