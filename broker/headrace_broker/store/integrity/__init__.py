"""What is on disk, whether it is whole, and whose it is: checkpoint, seals, lock."""
