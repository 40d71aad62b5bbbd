"""Request handlers, one class per group of codes: they check requests, services do the work."""
