"""The CommitLog, its records, and the ring that gets a row for each appended record."""
