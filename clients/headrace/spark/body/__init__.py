"""Message bodies as columns: schemas, and conversion of decoded values."""
