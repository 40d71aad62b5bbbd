"""The metrics of a broker; docs/metrics.md has the table."""
