"""Shared parts of the services that write messages because of other messages."""
