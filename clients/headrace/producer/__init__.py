"""Producer: sends single messages, batches and pipelines of messages."""
