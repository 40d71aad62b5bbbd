"""Rules as requests and answers have them, and back.

Words count in any case, as in Apache RocketMQ. What it takes for something else than it says, such
as an action that it does not know, is rejected here.
Source: docs/security.md "Rules"; tests/protocol/test_auth_requests.py.
"""

from __future__ import annotations

from enum import Enum
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.rights.auth_requests import AclInfo, PolicyEntryInfo, PolicyInfo
from headrace_protocol.rights.rules import (
    Action,
    BadRule,
    Decision,
    Entry,
    Pattern,
    Resource,
    Rules,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_protocol.rights.rules import Network

_SUBJECT: Final = "User:"
_ACTIONS: Final = {action.value.lower(): action for action in Action}
_DECISIONS: Final = {decision.value.lower() for decision in Decision}
_ADDRESSES_MAX: Final = 100


class PolicyType(Enum):
    """Type of a rule: the default ones count where no custom one speaks of a request."""

    CUSTOM = "Custom"
    DEFAULT = "Default"

    @classmethod
    def parse(cls, word: str | None) -> PolicyType:
        """From a word in any case; without one, CUSTOM. Raises BadRule."""
        for kind in cls:
            if kind.value.lower() == (word or cls.CUSTOM.value).lower():
                return kind
        raise BadRule(f"{word!r} is no type of policy: expected Custom or Default")


def subject_of(name: str) -> str:
    """The subject that stands for a user."""
    return _SUBJECT + name


def user_of(subject: str) -> str:
    """The user's name in a subject. Raises BadRule."""
    kind, name = subject[: len(_SUBJECT)], subject[len(_SUBJECT) :]
    if kind.lower() != _SUBJECT.lower() or not name:
        raise BadRule(f"The subject is null. {subject!r} is no subject: expected User:NAME")
    return name


# -- from requests ---------------------------------------------------------------------------------


def rules_of(info: AclInfo) -> Rules:
    """All rules of a request or an answer. Raises BadRule with Apache's remark and the word."""
    found: dict[PolicyType, list[Entry]] = {kind: [] for kind in PolicyType}
    for policy in info.policies:
        found[PolicyType.parse(policy.policy_type)] += map(entry_of, policy.entries)
    return Rules(found[PolicyType.CUSTOM], found[PolicyType.DEFAULT])


def entry_of(info: PolicyEntryInfo) -> Entry:
    """The rule of a request. Raises BadRule with Apache's remark and the word."""
    resource = resource_of(info.resource or "")
    _check_actions(info.actions)
    decision = info.decision or ""
    if decision.lower() not in _DECISIONS:
        raise BadRule(
            f"The decision is null or illegal. {decision!r} is no decision: expected Allow or Deny"
        )
    addresses = info.source_ips or []
    _check_addresses(addresses)
    return Entry.parse(str(resource), info.actions, addresses, decision)


def resource_of(text: str) -> Resource:
    """The resources that a text names. Raises BadRule with Apache's remark and the text."""
    try:
        resource = Resource.parse(text)
    except BadRule as error:
        raise BadRule(f"The resource is null. {error}") from None
    name = resource.name
    if not name and resource.pattern is not Pattern.ANY:
        raise BadRule(
            f"The resource is null. {text!r} names nothing: expected a name, or * for all"
        )
    if "*" in name or " " in name or not name.isprintable() or len(name) > NAME_CHARS_MAX:
        raise BadRule(
            f"The resource is null. {text[:NAME_CHARS_MAX]!r}: expected a name of up to "
            f"{NAME_CHARS_MAX} characters without blanks, which may end with one *"
        )
    return resource


def _check_actions(words: Iterable[str]) -> None:
    lower = [word.lower() for word in words]
    if not lower:
        raise BadRule("The actions is empty.")
    if "any" in lower:
        raise BadRule("The actions can not be Any.")
    for word in lower:
        if word not in _ACTIONS:
            known = ", ".join(action.value for action in Action)
            raise BadRule(f"The actions is empty. {word!r} is no action: expected {known}")


def _check_addresses(addresses: list[str]) -> None:
    if len(addresses) > _ADDRESSES_MAX:
        raise BadRule(f"{len(addresses)} addresses: the maximum for a rule is {_ADDRESSES_MAX}")
    for address in addresses:
        if not address.strip():
            raise BadRule("The source ip is empty.")
        try:
            ip_network(address, strict=False)
        except ValueError:
            raise BadRule(
                f"The source ip is invalid. {address!r} is no IP address or network such as "
                "192.0.2.0/24"
            ) from None


# -- to answers ------------------------------------------------------------------------------------


def acl_info(name: str, rules: Rules, resource_filter: str = "") -> AclInfo | None:
    """The rules of a user whose resources contain a text; None without any."""
    policies = [
        PolicyInfo(policy_type=kind.value, entries=infos)
        for kind, entries in (
            (PolicyType.CUSTOM, rules.custom),
            (PolicyType.DEFAULT, rules.default),
        )
        if (infos := [_info(each) for each in entries if resource_filter in str(each.resource)])
    ]
    return AclInfo(policies=policies, subject=subject_of(name)) if policies else None


def _info(entry: Entry) -> PolicyEntryInfo:
    return PolicyEntryInfo(
        actions=[action.value for action in Action if action in entry.actions],
        decision=entry.decision.value,
        resource=str(entry.resource),
        source_ips=list(map(address_text, entry.networks)) or None,
    )


def address_text(network: Network) -> str:
    """A network, or a single address without its length, as users write them."""
    is_single = network.prefixlen == network.max_prefixlen
    return str(network.network_address) if is_single else str(network)
