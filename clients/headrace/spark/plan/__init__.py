"""Read planning on the driver: queue ranges, split into tasks."""
