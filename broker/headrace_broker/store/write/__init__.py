"""From append to publish: the write path, confirmation and flush."""
