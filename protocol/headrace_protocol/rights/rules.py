"""Rules of users and the decision that they make, as Apache RocketMQ 5.5.0 decides.

Source: org.apache.rocketmq.auth.authorization; docs/security.md "Rules".
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import cached_property
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

    Address = IPv4Address | IPv6Address
    Network = IPv4Network | IPv6Network


class BadRule(PortableError):
    """A rule, or a part of one, that can't be used."""


class Kind(Enum):
    """Kind of a resource."""

    ANY = "*"
    CLUSTER = "Cluster"
    TOPIC = "Topic"
    GROUP = "Group"


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

    def has(self, kind: Kind, name: str) -> bool:
        """True for a resource that the rule speaks of."""
        if self.kind not in (Kind.ANY, kind):
            return False
        if self.pattern is Pattern.LITERAL:
            return name == self.name
        return name.startswith(self.name)

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

    def has(self, kind: Kind, name: str, wanted: frozenset[Action], address: Address) -> bool:
        """True for a request that the rule speaks of. wanted: one of them is enough."""
        return (
            self.resource.has(kind, name)
            and (Action.ALL in self.actions or not self.actions.isdisjoint(wanted))
            and (not self.networks or any(_is_in(address, each) for each in self.networks))
        )


def _network(text: str) -> Network:
    try:
        return ip_network(text, strict=False)
    except ValueError as error:
        raise BadRule(f"{text!r} is no IP address or network: {error}") from error


def _is_in(address: Address, network: Network) -> bool:
    """``::/0`` has IPv4 addresses, too."""
    if address.version == network.version:
        return address in network
    return network.version == 6 and not network.prefixlen


class Verdict(NamedTuple):
    """A decision. entry: the rule that makes it; None if none speaks of the request."""

    is_allowed: bool
    entry: Entry | None


NOBODY: Final = Verdict(is_allowed=False, entry=None)


class Rules:
    """The rules of a user. custom: those of a policy; default: for requests without one of those.

    Immutable; verdicts are kept, so that rules that change are another object.
    """

    def __init__(self, custom: Iterable[Entry] = (), default: Iterable[Entry] = ()) -> None:
        self.custom, self.default = tuple(custom), tuple(default)
        self._verdicts: dict[tuple[Kind, str, frozenset[Action], str], Verdict] = {}

    def decide(self, kind: Kind, name: str, wanted: frozenset[Action], address: str) -> Verdict:
        """The verdict on a request. wanted: one of them is enough. address: the client's IP."""
        key = kind, name, wanted, address
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= _VERDICTS_MAX:
                self._verdicts.clear()
            verdict = self._verdicts[key] = self._decide(kind, name, wanted, ip_address(address))
        return verdict

    def _decide(
        self, kind: Kind, name: str, wanted: frozenset[Action], address: Address
    ) -> Verdict:
        for entries in (self.custom, self.default):
            found = [entry for entry in entries if entry.has(kind, name, wanted, address)]
            if found:
                entry = max(found, key=_weight)
                return Verdict(entry.decision is Decision.ALLOW, entry)
        return NOBODY

    @cached_property
    def is_empty(self) -> bool:
        """True without any rule."""
        return not (self.custom or self.default)


_VERDICTS_MAX: Final = 1024


def _weight(entry: Entry) -> tuple[tuple[bool, int, int], bool]:
    return entry.resource.rank, entry.decision is Decision.DENY
