"""Users, rules and secrets of a daemon: their settings, their file, and the requests about them."""
