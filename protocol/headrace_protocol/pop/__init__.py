"""POP: requests, handles and the offsets in answers."""
