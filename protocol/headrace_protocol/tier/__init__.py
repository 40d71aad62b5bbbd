"""Layouts of the tier, and drivers of folders and buckets, for the broker and Spark's tasks."""
