"""A feature as one record: all that it adds to a broker.

``build`` in a feature's ``feature.py`` makes its record from the core. ``assembly`` adds up the
records of all features, field by field, and connects each field once: what is not in the record is
not connected. A feature that is switched off imports nothing and returns the empty record, or one
that rejects its requests.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace_broker.store.followers.following import SAVE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from headrace_broker.consumer.unconsumed import InnerConsumer
    from headrace_broker.inner.writer import FindTarget
    from headrace_broker.message_demands import Demand
    from headrace_broker.persistence import SavedFile
    from headrace_broker.queue_directory import FindPlace, FindSource
    from headrace_broker.store.followers.follower_work import Follower
    from headrace_broker.store.followers.following import Following
    from headrace_broker.store.reader import KeySource
    from headrace_broker.store.recovery import Scan
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.topics.rules import QueueMove, TopicRule
    from headrace_daemon.metrics.samples import Collect
    from headrace_daemon.services import Service
    from headrace_protocol.serving import Registry


class Processor(Protocol):
    """Serves a group of request codes."""

    def register(self, registry: Registry) -> None:
        """Route the requests to this processor."""


class Followed(NamedTuple):
    """A follower, and how the store runs it; see ``Followers.add``.

    on_following: called with what runs the follower.
    """

    follower: Follower
    on_following: Callable[[Following], None] = lambda _following: None
    save_s: float = SAVE_S
    holds_log: Callable[[], bool] = lambda: True


class Feature(NamedTuple):
    """The parts of a feature, each in the order in which it applies.

    places: find where a queue is served. sources: find where a queue served here is read.
    key_sources: have messages that are looked up by key and may have left the log.
    scans: get the records that a start reads from the log, each from an offset on.
    followers: read whole queues in the background.
    inner_consumers: what messages in system topics wait for; their log files stay until then.
    unconsumed: change what must stay in the log until groups have consumed it.
    demands: what messages ask of the broker. targets: find where a message goes that has waited.
    staged_bytes: bytes that are staged for a query.
    turn_ends: called before a turn is committed; each returns whether it has appended.
    topic_rules: check changes and deletions of topics. moves: notified of queues that move away.
    before_registration: awaited before each registration at a nameserver, with its address.
    guards: add checks that requests must pass; see ``Registry.guard``.
    processors: serve requests.
    tables: files that a thread writes, at a stop in this order.
    services: tasks, and work at start and stop, in the order of the start.
    collectors: measure for the metrics page. runtime_info: numbers for GET_BROKER_RUNTIME_INFO.
    """

    places: tuple[FindPlace, ...] = ()
    sources: tuple[FindSource, ...] = ()
    key_sources: tuple[KeySource, ...] = ()
    scans: tuple[Scan, ...] = ()
    followers: tuple[Followed, ...] = ()
    inner_consumers: tuple[InnerConsumer, ...] = ()
    unconsumed: tuple[Callable[[LowestUnconsumed], LowestUnconsumed], ...] = ()
    demands: tuple[Demand, ...] = ()
    targets: tuple[FindTarget, ...] = ()
    staged_bytes: tuple[Callable[[str], int], ...] = ()
    turn_ends: tuple[Callable[[], bool], ...] = ()
    topic_rules: tuple[TopicRule, ...] = ()
    moves: tuple[QueueMove, ...] = ()
    before_registration: tuple[Callable[[str], Awaitable[None]], ...] = ()
    guards: tuple[Callable[[Registry], None], ...] = ()
    processors: tuple[Processor, ...] = ()
    tables: tuple[SavedFile, ...] = ()
    services: tuple[Service, ...] = ()
    collectors: tuple[Collect, ...] = ()
    runtime_info: tuple[Callable[[], Mapping[str, str]], ...] = ()


def merge(features: Iterable[Feature]) -> Feature:
    """All features as one record."""
    return Feature(*(tuple(chain(*parts)) for parts in zip(*features, strict=True)))
