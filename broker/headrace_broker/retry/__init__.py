"""Messages that a consumer could not handle: they come again, and end as dead letters."""
