"""The broker daemon: store, request processors and server."""
