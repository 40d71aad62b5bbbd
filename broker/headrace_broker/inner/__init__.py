"""What services share that write messages because of other messages."""
