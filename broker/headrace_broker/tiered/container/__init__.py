"""Queues as Apache's tier keeps them: per queue a log and a consume queue over growing files."""
