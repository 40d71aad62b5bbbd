"""RocketMQ's remoting protocol: bytes in, events out; no socket, clock or thread."""

__version__ = "0.1.0.dev0"
