"""Drivers: one small interface to the folders and buckets that keep the tier's bytes."""
