"""Metrics of a daemon: collected in its loop in slices, encoded in a thread for Prometheus."""
