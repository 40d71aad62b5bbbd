"""The commit log, the records in it, and the ring of rows that follows each append."""
