"""Rules of users and the decision that they make, as Apache RocketMQ 5.5.0 decides.

Source: org.apache.rocketmq.auth.authorization; docs/security.md "Rules".
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import cached_property, lru_cache
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from ipaddress import IPv4Network, IPv6Network

    Network = IPv4Network | IPv6Network


class BadRule(PortableError):
    """A rule, or a part of one, that can't be used."""


class Kind(Enum):
    """Kind of a resource."""

    ANY = "*"
    CLUSTER = "Cluster"
    TOPIC = "Topic"
    GROUP = "Group"

    # Enum's own is written in Python, and each decision asks for one.
    __hash__ = object.__hash__


class Pattern(IntEnum):
    """Form of a resource's name; the greater one counts before the others."""

    ANY = 0
    PREFIX = 1
    LITERAL = 2


class Action(Enum):
    """An action on a resource. ALL stands for any; no request asks for LIST."""

    ALL = "All"
    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


class Decision(Enum):
    """The outcome of a rule."""

    ALLOW = "Allow"
    DENY = "Deny"


_KINDS: Final = {kind.value.lower(): kind for kind in Kind}
_ACTIONS: Final = {action.value.lower(): action for action in Action}
_DECISIONS: Final = {decision.value.lower(): decision for decision in Decision}


class Resource(NamedTuple):
    """The resources of a rule. name: empty for ``Pattern.ANY``, and for an empty name."""

    kind: Kind
    pattern: Pattern
    name: str

    @classmethod
    def parse(cls, text: str) -> Resource:
        """From ``*``, ``Topic:*``, ``Topic:orders*`` or ``Topic:orders``. Raises BadRule."""
        word, _, name = text.partition(":")
        kind = _KINDS.get(word.lower())
        if kind is None or (kind is Kind.ANY and text != "*"):
            raise BadRule(f"{text!r} is no resource: expected *, or Topic:, Group: or Cluster:NAME")
        if kind is Kind.ANY or name.strip("*") == "" != name:
            return cls(kind, Pattern.ANY, "")
        if name.endswith("*"):
            return cls(kind, Pattern.PREFIX, name[:-1])
        return cls(kind, Pattern.LITERAL, name)

    def __str__(self) -> str:
        if self.kind is Kind.ANY:
            return "*"
        star = "" if self.pattern is Pattern.LITERAL else "*"
        return f"{self.kind.value}:{self.name}{star}"

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The greater counts: a kind before all, a literal name before the longest prefix."""
        return self.kind is not Kind.ANY, self.pattern, len(self.name)


class Entry(NamedTuple):
    """One rule. networks: of the clients that it speaks of; none for all."""

    resource: Resource
    actions: frozenset[Action]
    networks: tuple[Network, ...]
    decision: Decision

    @classmethod
    def parse(
        cls, resource: str, actions: Iterable[str], addresses: Iterable[str], decision: str
    ) -> Entry:
        """From the words of a request; unknown actions are left out. Raises BadRule."""
        known = frozenset(_ACTIONS[word.lower()] for word in actions if word.lower() in _ACTIONS)
        if not known:
            raise BadRule(f"{list(actions)!r} has no action of {', '.join(_ACTIONS)}")
        if decision.lower() not in _DECISIONS:
            raise BadRule(f"{decision!r} is no decision: expected Allow or Deny")
        return cls(
            Resource.parse(resource),
            known,
            tuple(map(_network, addresses)),
            _DECISIONS[decision.lower()],
        )


def _network(text: str) -> Network:
    try:
        return ip_network(text, strict=False)
    except ValueError as error:
        raise BadRule(f"{text!r} is no IP address or network: {error}") from error


# Clients have few addresses at a time.
_parsed_address = lru_cache(4096)(ip_address)


def _is_in(text: str, networks: Iterable[Network]) -> bool:
    """``::/0`` has IPv4 addresses, too."""
    address = _parsed_address(text)
    return any(
        address in network
        if address.version == network.version
        else network.version == 6 and not network.prefixlen
        for network in networks
    )


class Verdict(NamedTuple):
    """A decision. entry: the rule that makes it; None if none speaks of the request."""

    is_allowed: bool
    entry: Entry | None


NOBODY: Final = Verdict(is_allowed=False, entry=None)


class Rules:
    """The rules of a user. custom: those of a policy; default: for requests without one of those.

    Immutable: changed rules are another object.
    """

    def __init__(self, custom: Iterable[Entry] = (), default: Iterable[Entry] = ()) -> None:
        self.custom, self.default = tuple(custom), tuple(default)

    def decide(self, kind: Kind, name: str, wanted: frozenset[Action], address: str) -> Verdict:
        """The verdict on a request. wanted: one of them is enough. address: the client's IP.

        Cost: 3 µs at most with 20 rules, of any of 10,000 users.
        """
        for literal, others in self._by_kind[kind]:
            for rows in (literal.get(name, ()), others):
                for text, actions, networks, verdict in rows:
                    if (
                        name.startswith(text)
                        and not actions.isdisjoint(wanted)
                        and (not networks or _is_in(address, networks))
                    ):
                        return verdict
        return NOBODY

    @cached_property
    def _by_kind(self) -> Mapping[Kind, list[_Ordered]]:
        """The rules that can speak of each kind: custom ones, then default ones."""
        policies = [entries for entries in (self.custom, self.default) if entries]
        return {kind: [_ordered(kind, entries) for entries in policies] for kind in Kind}

    @property
    def is_empty(self) -> bool:
        """True without any rule."""
        return not (self.custom or self.default)


class _Row(NamedTuple):
    """A rule, with what each request is compared with at hand."""

    text: str
    actions: frozenset[Action]
    networks: tuple[Network, ...]
    verdict: Verdict


# Literal rules by name, and the others; of two that speak of a request, the first one counts.
_Ordered = tuple[dict[str, list[_Row]], list[_Row]]


def _ordered(kind: Kind, entries: Iterable[Entry]) -> _Ordered:
    literal: dict[str, list[_Row]] = {}
    others: list[_Row] = []
    for entry in sorted(entries, key=_weight, reverse=True):
        resource = entry.resource
        is_literal, is_of_kind = resource.pattern is Pattern.LITERAL, resource.kind is kind
        if is_literal and is_of_kind:
            literal.setdefault(resource.name, []).append(_row(entry))
        elif resource.kind is Kind.ANY or (is_of_kind and not is_literal):
            others.append(_row(entry))
    return literal, others


def _row(entry: Entry) -> _Row:
    resource, actions, networks, decision = entry
    return _Row(
        resource.name,
        frozenset(Action) if Action.ALL in actions else actions,
        networks,
        Verdict(decision is Decision.ALLOW, entry),
    )


def _weight(entry: Entry) -> tuple[tuple[bool, int, int], bool]:
    return entry.resource.rank, entry.decision is Decision.DENY
