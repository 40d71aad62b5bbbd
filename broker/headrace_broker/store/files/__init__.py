"""Files and folders: mapped, locked, cached, and written whole."""
