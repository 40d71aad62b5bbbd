"""The audit log of a daemon: a file of JSON lines, each with the hash of the one before."""
