"""Users and rules, as operators write them and as daemons return them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec

from headrace.errors import ConfigurationError
from headrace_protocol.rights.access import is_of_readers
from headrace_protocol.rights.rules import Action, BadRule, Entry, Pattern, Resource, Rules
from headrace_protocol.rights.wanted import OWN_CLUSTER, Wanted, wanted_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CUSTOM: Final = "Custom"
DEFAULT: Final = "Default"
_UNKNOWN: Final = "there is no such user; without one, anonymousAccess counts"
_ACTIONS: Final = {action.value.lower(): action for action in Action}
_POLICIES: Final = {word.lower(): word for word in (CUSTOM, DEFAULT)}


class ClusterUser(msgspec.Struct, frozen=True, order=True):
    """A user as a daemon knows it.

    is_super: it may do everything. is_enabled: it may log in. signs: it may also sign requests, as
    Apache RocketMQ's clients do; if not, it can only log in. has_password: if not, it can only log
    in with a token or a certificate.
    """

    name: str
    is_super: bool = False
    is_enabled: bool = True
    signs: bool = True
    has_password: bool = True


class Rule(msgspec.Struct, frozen=True, order=True):
    """A rule of a user.

    resource: ``*``, ``Topic:orders``, ``Topic:orders*`` or ``Topic:*``; also Group and Cluster.
    actions: some of Pub, Sub, Create, Update, Delete, Get and List; or All.
    addresses: IP addresses and networks of the clients that it speaks of; none for all.
    decision: ``Allow`` or ``Deny``.
    policy: ``Custom``; or ``Default``, for requests that no Custom rule speaks of.
    """

    resource: str
    actions: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    decision: str = "Allow"
    policy: str = CUSTOM

    def checked(self) -> Self:
        """The same rule with its words in their proper case. Raises ConfigurationError."""
        entry = self.entry()
        policy = _POLICIES.get(self.policy.lower())
        if policy is None:
            raise ConfigurationError(
                f"{self.policy!r} is no policy: expected {CUSTOM} or {DEFAULT}"
            )
        return type(self)(
            str(entry.resource),
            tuple(action.value for action in Action if action in entry.actions),
            tuple(self.addresses),
            entry.decision.value,
            policy,
        )

    def entry(self) -> Entry:
        """The rule as daemons decide with it. Raises ConfigurationError."""
        for word in self.actions:
            check_action(word)
        try:
            return Entry.parse(self.resource, self.actions, self.addresses, self.decision)
        except BadRule as error:
            raise ConfigurationError(str(error)) from error

    def __str__(self) -> str:
        where = f" from {', '.join(self.addresses)}" if self.addresses else ""
        kind = "" if self.policy == CUSTOM else f" ({self.policy})"
        return f"{self.decision} {', '.join(self.actions)} on {self.resource}{where}{kind}"


def check_action(word: str) -> Action:
    """The action that a word names. Raises ConfigurationError."""
    action = _ACTIONS.get(word.lower())
    if action is None:
        known = ", ".join(each.value for each in Action)
        raise ConfigurationError(f"{word!r} is no action: expected one of {known}")
    return action


class Question(NamedTuple):
    """Whether a user may do something. address: the client's IP."""

    want: Wanted
    address: str


def question(action: str, resource: str, address: str) -> Question:
    """What the words of an operator ask. Raises ConfigurationError.

    A retry or dead-letter topic counts as its group, as daemons decide.
    """
    found = check_action(action)
    try:
        asked = Resource.parse(resource)
        # Checks the address.
        Entry.parse(resource, [action], [address], "Allow")
    except BadRule as error:
        raise ConfigurationError(str(error)) from error
    if asked.pattern is not Pattern.LITERAL or not asked.name or "/" in address:
        what = f"address {address}" if "/" in address else f"resource {resource}"
        raise ConfigurationError(f"{what}: name a single one, such as Topic:orders or 10.0.0.7")
    want = wanted_of(asked.kind, asked.name, frozenset({found}))
    if want.name == OWN_CLUSTER:
        (needed,) = want.actions
        raise ConfigurationError(
            f"{resource} is the brokers' own, so it counts as their cluster: ask for "
            f"{needed.value} on Cluster:NAME"
        )
    return Question(want, address)


class Answer(NamedTuple):
    """A decision. rule: the one that decides, if any. reason: in words."""

    is_allowed: bool
    rule: Rule | None
    reason: str


def explain(user: ClusterUser | None, rules: Sequence[Rule], asked: Question) -> Answer:
    """The decision of a daemon that has these rules of a user."""
    if user is None:
        return Answer(is_allowed=False, rule=None, reason=_UNKNOWN)
    if not user.is_enabled:
        return Answer(is_allowed=False, rule=None, reason="the user is disabled")
    if is_of_readers(asked.want):
        reason = "every user may read in this group, which stands for none"
        return Answer(is_allowed=True, rule=None, reason=reason)
    if user.is_super:
        return Answer(is_allowed=True, rule=None, reason="a Super user may do everything")
    custom, default = _by_entry(rules, CUSTOM), _by_entry(rules, DEFAULT)
    verdict = Rules(custom, default).decide(*asked.want, asked.address)
    if verdict.entry is None:
        return Answer(is_allowed=False, rule=None, reason="no rule speaks of it")
    rule = custom.get(verdict.entry) or default[verdict.entry]
    return Answer(verdict.is_allowed, rule, "this rule decides")


def _by_entry(rules: Iterable[Rule], policy: str) -> dict[Entry, Rule]:
    return {rule.entry(): rule for rule in rules if rule.policy == policy}
