"""What a broker tells Prometheus; docs/metrics.md has the table."""
