"""Layouts of the tier, and the places that keep them: read by the broker and by Spark's tasks."""
