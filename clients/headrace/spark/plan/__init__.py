"""What the driver plans: ranges of queues, cut into tasks."""
