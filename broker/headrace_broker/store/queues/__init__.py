"""ConsumeQueues, which map queue offsets to physical offsets."""
