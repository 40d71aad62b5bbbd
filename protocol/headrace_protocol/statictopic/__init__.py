"""Static topics without any I/O: mappings, offset arithmetic, checks and plans of changes."""
