"""The checkpoint, the seals and the lock of a store directory."""
