"""ConsumeQueues: from queue offset to physical offset."""
