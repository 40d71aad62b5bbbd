"""Queues in an object store: immutable objects of many queues, named by one manifest."""
