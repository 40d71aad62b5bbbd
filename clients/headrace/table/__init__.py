"""A topic as a table: the newest value of every key."""
