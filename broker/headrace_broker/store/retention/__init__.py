"""Retention: what is removed, when, and what must be kept longer."""
