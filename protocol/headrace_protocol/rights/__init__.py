"""Users, their rules, and the rights that each request needs."""
