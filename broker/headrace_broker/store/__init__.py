"""The storage engine: knows files and numpy; knows no socket and no request."""
