"""What is removed, when, and what that waits for."""
