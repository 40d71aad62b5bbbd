"""The most that a nameserver keeps for brokers: for one, for those of one host, and for all.

Sizes count topics and mapped queues.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace_protocol.bounds import REGISTERED_TOPICS_MAX


class Limits(NamedTuple):
    """Limits of the route table. departed: of brokers that left.

    A broker that left has at most half of what its host may have.
    """

    size: int = REGISTERED_TOPICS_MAX
    brokers_of_host: int = 256
    brokers: int = 1024
    size_of_host: int = 4 * REGISTERED_TOPICS_MAX
    size_of_all: int = 16 * REGISTERED_TOPICS_MAX
    departed_of_host: int = 256
    departed: int = 1024
    departed_size_of_host: int = 2 * REGISTERED_TOPICS_MAX
    departed_size: int = 4 * REGISTERED_TOPICS_MAX


LIMITS = Limits()
