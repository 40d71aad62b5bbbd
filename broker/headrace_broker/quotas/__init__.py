"""Quotas of users, topics and groups."""
