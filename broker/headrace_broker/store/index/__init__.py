"""IndexFiles: from key to physical offset."""
