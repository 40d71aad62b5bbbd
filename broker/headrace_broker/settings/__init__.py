"""The table of settings: its rows, the keys of Apache RocketMQ, and the errors for wrong values."""
