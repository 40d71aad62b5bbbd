"""The broker daemon: store, processors and server."""
