"""The common parts of broker and nameserver: process, logs, services, network."""
