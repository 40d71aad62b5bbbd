"""Consumption: groups, their members, settings, progress and queue locks; held requests."""
