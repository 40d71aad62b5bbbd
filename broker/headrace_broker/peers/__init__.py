"""Requests of this broker to other brokers and to nameservers."""
