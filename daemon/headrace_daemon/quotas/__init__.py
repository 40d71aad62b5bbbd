"""Quotas: what users take of a daemon is measured, and bounded where a quota says so."""
