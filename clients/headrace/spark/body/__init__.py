"""Bodies as columns: schemas, and the kinds of values that they have."""
