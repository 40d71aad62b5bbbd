"""Files and folders: mapped files, the page cache, small files that are replaced whole."""
