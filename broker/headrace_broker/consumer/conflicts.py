"""Members of a group whose subscriptions differ, although each gets messages of all queues.

A member's share of the queues loses what the broker filters by another member's tags, and topics
that only some members read lose the shares of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_broker.consumer.filters import TAG, is_by_tag
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.bodies import ConsumerData
    from headrace_protocol.channel import Channel

REFUSE = "refuse"
# Of a subscription in texts.
_CHARS_MAX = 300
_ALL = "*"

# Topic, type of expression, and tags or another expression, in order.
Subscribed = tuple[tuple[str, str, tuple[str, ...]], ...]


class ConflictPolicy(Protocol):
    """Settings of the broker about conflicts; they may change while it runs."""

    @property
    def subscription_conflict(self) -> str:
        """``warn`` or ``refuse``."""


class Declarations:
    """The subscriptions of the members of one group; not of those that assign themselves queues."""

    __slots__ = ("_clients", "_of", "_reported")

    def __init__(self) -> None:
        self._of: dict[Channel, Subscribed] = {}
        # Client ids of the members that have the same subscriptions.
        self._clients: dict[Subscribed, dict[Channel, str]] = {}
        # The difference reported last: until another one, it is not reported again.
        self._reported: frozenset[Subscribed] = frozenset()

    def check(self, client_id: str, data: ConsumerData, policy: ConflictPolicy) -> str:
        """A new conflict of a member with another one, as a text; empty if there is none.

        Raises RequestError with that text if the policy is to refuse, new or not.
        """
        mine = subscribed(data)
        other = self._other(client_id, mine)
        if other is None:
            return ""
        other_id, theirs = other
        text = _difference(data.group_name, client_id, mine, other_id, theirs)
        if policy.subscription_conflict == REFUSE:
            raise RequestError(ResponseCode.NO_PERMISSION, text)
        pair = frozenset((mine, theirs))
        is_new, self._reported = pair != self._reported, pair
        return text if is_new else ""

    def _other(self, client_id: str, mine: Subscribed) -> tuple[str, Subscribed] | None:
        """Another client with other subscriptions."""
        if not mine:
            return None
        for theirs, clients in self._clients.items():
            if theirs != mine:
                for other_id in clients.values():
                    if other_id != client_id:
                        return other_id, theirs
        return None

    def difference(self, group: str) -> str:
        """Two members with different subscriptions, as a text; empty if all agree."""
        for mine, clients in self._clients.items():
            for client_id in clients.values():
                if other := self._other(client_id, mine):
                    return _difference(group, client_id, mine, *other)
        return ""

    def put(self, channel: Channel, client_id: str, data: ConsumerData) -> None:
        """Record what a member subscribes to."""
        self.remove(channel)
        if mine := subscribed(data):
            self._of[channel] = mine
            self._clients.setdefault(mine, {})[channel] = client_id

    def remove(self, channel: Channel) -> None:
        """Forget a member."""
        if (known := self._of.pop(channel, None)) is None:
            return
        clients = self._clients[known]
        del clients[channel]
        if not clients:
            del self._clients[known]


class SubscriptionConflicts:
    """The answer to conflicts in all groups: a log line or a refusal."""

    def __init__(self, policy: ConflictPolicy, log: HostLog) -> None:
        self._policy = policy
        self._log = log

    def check(
        self, declared: Declarations, channel: Channel, client_id: str, data: ConsumerData
    ) -> None:
        """Log a conflict of a member once. Raises RequestError instead if it is to be refused."""
        if text := declared.check(client_id, data, self._policy):
            self._log.warning(channel.address, "subscriptions differ", reason=text)


def subscribed(data: ConsumerData) -> Subscribed:
    """A member's subscriptions in a form that can be compared."""
    return tuple(
        sorted(
            (each.topic, *_kind_and_terms(each.expression_type, each.sub_string))
            for each in data.subscription_data_set
        )
    )


def _kind_and_terms(expression_type: str, expression: str) -> tuple[str, tuple[str, ...]]:
    if not is_by_tag(expression_type):
        return expression_type, (expression,)
    tags = {tag.strip() for tag in expression.split("||")} - {""}
    return TAG, (_ALL,) if not tags or _ALL in tags else tuple(sorted(tags))


def _difference(
    group: str, client_id: str, mine: Subscribed, other_id: str, theirs: Subscribed
) -> str:
    return (
        f"group {group}: client {client_id} subscribes to {_text(mine)}, client {other_id} to "
        f"{_text(theirs)}; all members of a group must have the same subscriptions"
    )


def _text(each: Subscribed) -> str:
    text = ", ".join(f"{topic} ({' || '.join(terms)})" for topic, _, terms in each)
    return text if len(text) <= _CHARS_MAX else f"{text[:_CHARS_MAX]}..."
