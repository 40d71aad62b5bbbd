"""Topics: their table, attributes and incarnations, and kinds that only the peer serves."""
