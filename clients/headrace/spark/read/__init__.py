"""Reads of topics: batch and stream on the driver, and what runs in a task."""
