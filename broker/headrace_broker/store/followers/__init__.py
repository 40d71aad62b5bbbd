"""Background readers of the queues, such as one that copies them; they may be minutes behind."""
