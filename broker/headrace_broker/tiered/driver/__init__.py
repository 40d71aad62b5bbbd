"""Drivers: one small interface to the places that keep the tier's bytes."""
