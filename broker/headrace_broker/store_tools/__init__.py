"""Offline tools for a store directory: check and repair, print, count, copy."""
