"""I/O drivers for a client's Connection: anyio streams and blocking sockets."""
