"""Reads of topics: batch and stream planning on the driver, and execution in tasks."""
