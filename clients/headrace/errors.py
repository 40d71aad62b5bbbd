"""Errors raised by the clients. A retry loop needs only ``retryable`` and ``refresh_route``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_protocol.drivers.errors import (
    AccessDenied,
    BrokerError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    LogInFailed,
    MalformedAnswer,
    QueuePartAway,
    RequestTimeout,
    TlsFailed,
    WrongServer,
)
from headrace_protocol.system_topics import DLQ_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.missing import MissingPart
    from headrace_protocol.bodies import MessageQueue

__all__ = [
    "AccessDenied",
    "BrokerError",
    "ChangedInPart",
    "ClientClosed",
    "ConfigurationError",
    "ConnectFailed",
    "ConnectionLost",
    "CopyBehind",
    "DelayRejected",
    "HeadraceError",
    "InvalidMessage",
    "InvalidValue",
    "KeyLookupUnsupported",
    "LogInFailed",
    "MalformedAnswer",
    "NameserverUnavailable",
    "NoBroker",
    "NoQueue",
    "NoReply",
    "OffsetNotFound",
    "OpenedBeforeFork",
    "OutcomeUnknown",
    "PartialAnswer",
    "PipelineError",
    "QueuePartAway",
    "RecallRejected",
    "RequestTimeout",
    "RouteNotFound",
    "RuleNotFound",
    "StrategyFailed",
    "TableNotLoaded",
    "TlsFailed",
    "UserExists",
    "UserNotFound",
    "WrongEventLoop",
    "WrongServer",
]


_PARTS_NAMED_MAX = 3


class ConfigurationError(HeadraceError, ValueError):
    """A setting or argument that cannot work."""


class StrategyFailed(HeadraceError):
    """A consumer's ``strategy`` raised, or returned no queues; its error is the cause."""


class InvalidMessage(HeadraceError, ValueError):
    """A message that every broker would reject."""


class DelayRejected(HeadraceError):
    """A broker does not deliver a message after its ``delay`` or at its ``deliver_at``."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"the broker at {address} rejects the message's time of delivery: {reason}. Choose an "
            "earlier time or a delay_level="
        )
        self.address = address


class RecallRejected(BrokerError):
    """A message is not recalled: it was delivered already, or its broker recalls none."""

    retryable = False
    refresh_route = False


class NoReply(HeadraceError):
    """A request got no reply in time; whether it was handled is unknown."""

    def __init__(self, topic: str, timeout_s: float, *, is_sent: bool) -> None:
        what = (
            "no consumer replied: see whether one runs, and allow more time"
            if is_sent
            else "no broker has confirmed that it has the request"
        )
        super().__init__(f"request to {topic}: no reply within {timeout_s:g} s; {what}")
        self.topic = topic
        self.is_sent = is_sent


class OffsetsNotSaved(HeadraceError):
    """A broadcasting consumer's progress could not be written."""

    def __init__(self, path: str, reason: OSError) -> None:
        super().__init__(
            f"{path}: {reason}; after a restart, messages since the last save are delivered again"
        )
        self.path = path


class ClientClosed(HeadraceError):
    """A client was used outside its block, which begins with ``statement``."""

    def __init__(self, what: str, statement: str = "async with") -> None:
        super().__init__(f"{what} is not open; use it inside `{statement} {what}(...)`")


class WrongEventLoop(HeadraceError):
    """A client was used on another event loop than the one that it was opened on."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this {what} was opened on another event loop, which may have ended, and works only "
            "there: open one on each loop, or pass the call to its loop "
            "(asyncio.run_coroutine_threadsafe, trio.from_thread.run)"
        )


class OpenedBeforeFork(HeadraceError):
    """A blocking client was used in a child process that was forked while it was open."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this {what} was open when the process forked, and works only in the parent: create "
            f"and open another {what} in the child"
        )


class NameserverUnavailable(HeadraceError):
    """None of the nameservers answered.

    failures: the error of each nameserver, by address.
    retryable: one of them may answer later; not if all are servers of another kind.
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        reasons = "; ".join(str(error) for error in failures.values())
        super().__init__(f"no nameserver answered: {reasons}")
        self.failures = dict(failures)
        self.retryable = not all(isinstance(error, WrongServer) for error in failures.values())


class RouteNotFound(HeadraceError):
    """No broker that the nameserver knows has this topic.

    retryable: a broker may yet register it: the nameserver has just started, or the broker is away.
    """

    refresh_route = True

    def __init__(
        self, topic: str, remark: str | None = None, *, awaits_broker: bool = False
    ) -> None:
        super().__init__(
            f"no broker that the nameserver knows has topic {topic}"
            + (f" ({remark})" if remark else "")
            + (
                "; a broker may yet register it: retry later, or start its broker"
                if awaits_broker
                else _origin(topic)
            )
        )
        self.topic = topic
        self.retryable = awaits_broker


def _origin(topic: str) -> str:
    """The way in which a topic begins to exist."""
    if topic.startswith(DLQ_PREFIX):
        group = topic.removeprefix(DLQ_PREFIX)
        return f"; it begins with the first dead letter of group {group}, which has none"
    if topic.startswith(RETRY_PREFIX):
        group = topic.removeprefix(RETRY_PREFIX)
        return f"; it begins with the first member of group {group}, which had none"
    return f"; create it with `headrace topic create {topic}`"


class GroupNotFound(HeadraceError):
    """No broker has a group."""

    def __init__(self, group: str) -> None:
        super().__init__(f"group {group} does not exist; see `headrace group list`")
        self.group = group


class NoQueue(HeadraceError):
    """The topic has a route, but no queue that allows the operation.

    broker_name: the broker of the wanted queue, if that one is away; otherwise "".
    """

    retryable = True
    refresh_route = True

    def __init__(
        self,
        topic: str,
        wanted: str,
        reason: str = (
            "it has none at all, its permission or its brokers' permission forbids it, or no "
            "master is up"
        ),
        broker_name: str = "",
    ) -> None:
        super().__init__(
            f"topic {topic} has no queue to {wanted} now: {reason} "
            f"(see `headrace topic describe {topic}`)"
        )
        self.topic = topic
        self.broker_name = broker_name


class PartialAnswer(HeadraceError):
    """An answer would lack the messages of a broker that is away.

    parts: a ``MissingPart`` for each broker.
    """

    retryable = True
    refresh_route = True

    def __init__(self, topic: str, parts: Sequence[MissingPart]) -> None:
        """topic: its name; or other words for what was asked for, with a space."""
        what = topic if " " in topic else f"topic {topic}"
        self.parts_text = _first_parts(parts)
        names = [part.broker for part in parts if part.broker]
        super().__init__(
            f"{what} can't be read whole: {self.parts_text}. Start what is away, or accept "
            "a part: --allow-partial, allow_partial=True, in Spark failOnDataLoss=false"
            + (f"; `headrace broker forget {names[0]}` if it won't come back" if names else "")
        )
        self.topic = topic
        self.parts = tuple(parts)


class NotEverywhere(HeadraceError):
    """A change does not reach brokers that left with a part of what it changes.

    parts: a ``MissingPart`` for each broker.
    """

    retryable = True

    def __init__(self, change: str, parts: Sequence[MissingPart], way_out: str) -> None:
        """change: what is done and where, or is not. way_out: what to do once they are back."""
        super().__init__(
            f"{change}: {_first_parts(parts)}. {way_out}, or run `headrace broker forget "
            f"{parts[0].broker}` if it won't come back"
        )
        self.parts = tuple(parts)


def _first_parts(parts: Sequence[MissingPart]) -> str:
    more = f"; and {len(parts) - _PARTS_NAMED_MAX} more" if len(parts) > _PARTS_NAMED_MAX else ""
    return "; ".join(map(str, parts[:_PARTS_NAMED_MAX])) + more


class UserExists(HeadraceError):
    """A user is there already."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"user {name} exists already; `headrace acl user update {name}` changes it"
        )
        self.name = name


class UserNotFound(HeadraceError):
    """No daemon has a user."""

    def __init__(self, name: str) -> None:
        super().__init__(f"user {name} does not exist; see `headrace acl user list`")
        self.name = name


class RuleNotFound(HeadraceError):
    """No daemon has such a rule."""

    def __init__(self, user: str, resource: str | None) -> None:
        which = f"no rule for {resource}" if resource else "no rules"
        super().__init__(f"user {user} has {which}; see `headrace acl rule list`")
        self.user = user
        self.resource = resource


class ChangedInPart(HeadraceError):
    """A change of users or rules that some daemons did not carry out.

    done: the daemons that did. failures: the error of each other one. Both by ``Admin.keepers``.
    """

    def __init__(
        self, change: str, done: Sequence[str], failures: Mapping[str, HeadraceError]
    ) -> None:
        reasons = "; ".join(f"{keeper}: {error}" for keeper, error in failures.items())
        super().__init__(
            f"{change} at {', '.join(done)}, but not everywhere: {reasons}. Mend that, and repeat; "
            "`headrace doctor` shows daemons that differ"
        )
        self.done = tuple(done)
        self.failures = dict(failures)


class NoBroker(HeadraceError):
    """None of the brokers that a call needs is there; they have left.

    parts: a ``MissingPart`` for each broker.
    """

    retryable = True

    def __init__(self, parts: Sequence[MissingPart]) -> None:
        super().__init__(f"no broker is there: {_first_parts(parts)}; start it, and repeat")
        self.parts = tuple(parts)


class OffsetNotFound(HeadraceError):
    """A queue has no message at the offset to read."""

    def __init__(
        self, queue: MessageQueue, queue_offset: int, min_offset: int, max_offset: int
    ) -> None:
        super().__init__(
            f"{queue.topic}/{queue.broker_name}/{queue.queue_id} has no message at offset "
            f"{queue_offset}; its offsets run from {min_offset} to {max_offset}, exclusive; older "
            "messages are deleted with their log files"
        )
        self.queue = queue
        self.queue_offset = queue_offset
        self.min_offset = min_offset
        self.max_offset = max_offset

    def moved(self, queue: MessageQueue, delta: int) -> OffsetNotFound:
        """The same error of another queue, whose offsets are higher by ``delta``."""
        return OffsetNotFound(
            queue, self.queue_offset + delta, self.min_offset + delta, self.max_offset + delta
        )


class InvalidValue(HeadraceError, ValueError):
    """A value of a topic or table that is not one of its model.

    key: the value's key; empty without one.
    """

    def __init__(self, topic: str, key: str, model: str, reason: object) -> None:
        of = f"of key {key!r}" if key else "without a key"
        super().__init__(f"the value {of} in topic {topic} is not valid {model}: {reason}")
        self.key = key


class TableNotLoaded(HeadraceError):
    """A table's local copy was read before it was complete."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"table {topic} is still loading: await table.synced() first")


class CopyBehind(HeadraceError):
    """A table's write is stored, but the local copy can't read it.

    queue, queue_offset: where it is stored.
    """

    def __init__(self, queue: MessageQueue, queue_offset: int, reason: HeadraceError) -> None:
        super().__init__(
            f"table {queue.topic}: the write is stored at offset {queue_offset} of queue "
            f"{queue.queue_id} on broker {queue.broker_name}, but the local copy can't read it: "
            f"{reason}"
        )
        self.queue = queue
        self.queue_offset = queue_offset


class KeyLookupUnsupported(HeadraceError):
    """A broker does not look up messages by key, as a table without a local copy needs."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"the broker at {address} does not look up keys ({reason}): use a local copy, "
            "Table(..., local=True)"
        )
        self.address = address


class OutcomeUnknown(HeadraceError):
    """A pipeline was left by an exception before it knew whether the message is stored."""

    def __init__(self) -> None:
        super().__init__(
            "the pipeline was left by an exception before the outcome of this message was known"
        )


class PipelineError(HeadraceError):
    """Messages of a pipeline that were not stored, even after retries.

    failures: (message, error) pairs, in the order of failure.
    """

    def __init__(self, failures: Sequence[tuple[Any, HeadraceError]]) -> None:
        super().__init__(
            f"{len(failures)} messages of the pipeline were not sent; first error: {failures[0][1]}"
        )
        self.failures = list(failures)
