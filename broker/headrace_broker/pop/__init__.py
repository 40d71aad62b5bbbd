"""Messages that members of a group take one by one, and that come again until they are acked."""
