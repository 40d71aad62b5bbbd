"""IndexFiles, which map keys to physical offsets."""
