"""Requests, one class per kind: what is asked is checked here, and done by the services."""
