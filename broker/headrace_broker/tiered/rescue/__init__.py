"""Checks, repairs and moves a tier without its broker."""
