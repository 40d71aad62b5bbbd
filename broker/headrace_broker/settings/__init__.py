"""The table of settings: its rows, the keys of Apache RocketMQ, and what is wrong with a value."""
