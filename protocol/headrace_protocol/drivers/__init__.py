"""Byte movers for a Connection: anyio streams, blocking sockets, the serving side."""
