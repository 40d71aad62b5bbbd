"""TLS for daemons and clients."""
