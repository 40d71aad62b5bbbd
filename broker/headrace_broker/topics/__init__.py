"""The broker's topics: table, attributes, incarnations, the peer's kinds."""
