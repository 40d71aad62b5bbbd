"""Looking after topics, groups and brokers."""
