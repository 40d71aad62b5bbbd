"""The decision of rules: the cases that Apache RocketMQ was seen to decide, and random ones."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_protocol.rights.rules import (
    Action,
    BadRule,
    Decision,
    Entry,
    Kind,
    Pattern,
    Resource,
    Rules,
)

HERE = "127.0.0.1"
PUB = frozenset({Action.PUB})


def entry(text: str) -> Entry:
    """From ``Deny Pub,Sub Topic:orders* 10.0.0.0/8``."""
    decision, actions, resource, *addresses = text.split()
    return Entry.parse(resource, actions.split(","), addresses, decision)


@pytest.mark.parametrize(
    ("rules", "is_allowed"),
    [
        ([], False),
        (["Allow Pub Topic:orders"], True),
        (["allow pub topic:orders"], True),
        (["Allow Sub Topic:orders"], False),
        (["Allow All Topic:orders"], True),
        (["Allow Pub Group:orders"], False),
        (["Allow All *"], True),
        (["Allow All Topic:*"], True),
        (["Allow All Topic:**"], True),
        (["Allow All Topic:Orders"], False),
        (["Allow All Topic:ord*"], True),
        # A kind before all, a literal name before a prefix, the longer prefix before the other.
        (["Allow All *", "Deny All Topic:*"], False),
        (["Deny All *", "Allow All Topic:*"], True),
        (["Deny All Topic:*", "Allow All Topic:o*"], True),
        (["Deny All Topic:o*", "Allow All Topic:or*"], True),
        (["Allow All Topic:o*", "Deny All Topic:or*"], False),
        (["Deny All Topic:orders*", "Allow All Topic:orders"], True),
        # A tie.
        (["Allow All Topic:orders", "Deny Pub Topic:orders"], False),
        (["Deny Pub Topic:orders", "Allow All Topic:orders"], False),
        # A rule of other actions does not speak of it.
        (["Deny Sub Topic:orders", "Allow Pub Topic:*"], True),
        (["Allow Pub Topic:orders 10.0.0.0/8"], False),
        (["Allow Pub Topic:orders 127.0.0.0/8"], True),
        (["Allow Pub Topic:orders ::/0"], True),
        (["Allow Pub Topic:orders ::1"], False),
        (["Deny Pub Topic:orders 10.0.0.1", "Allow Pub Topic:*"], True),
        # A star inside a name is none.
        (["Allow All Topic:or*rs"], False),
    ],
)
def test_the_most_exact_rule_decides(rules: list[str], is_allowed: bool) -> None:
    verdict = Rules(map(entry, rules)).decide(Kind.TOPIC, "orders", PUB, HERE)
    assert verdict.is_allowed is is_allowed


def test_default_rules_count_without_a_custom_one() -> None:
    default = [entry("Allow Pub Topic:orders")]
    assert Rules([], default).decide(Kind.TOPIC, "orders", PUB, HERE).is_allowed
    custom = [entry("Deny Pub Topic:*")]
    assert not Rules(custom, default).decide(Kind.TOPIC, "orders", PUB, HERE).is_allowed
    custom = [entry("Deny Sub Topic:*")]
    assert Rules(custom, default).decide(Kind.TOPIC, "orders", PUB, HERE).is_allowed


def test_the_verdict_names_its_rule() -> None:
    rules = Rules([entry("Allow All *"), entry("Deny Pub Topic:orders")])
    verdict = rules.decide(Kind.TOPIC, "orders", PUB, HERE)
    assert verdict.entry == entry("Deny Pub Topic:orders")
    assert Rules().decide(Kind.TOPIC, "orders", PUB, HERE).entry is None


def test_one_of_the_wanted_actions_is_enough() -> None:
    wanted = frozenset({Action.PUB, Action.SUB, Action.GET})
    rules = Rules([entry("Allow Get Topic:orders")])
    assert rules.decide(Kind.TOPIC, "orders", wanted, HERE).is_allowed
    rules = Rules([entry("Allow Get Topic:orders"), entry("Deny Sub Topic:orders")])
    assert not rules.decide(Kind.TOPIC, "orders", wanted, HERE).is_allowed


@pytest.mark.parametrize("text", ["", "Queue:a", "*:*", "**", "Topics:a", "Any"])
def test_other_resources_are_refused(text: str) -> None:
    with pytest.raises(BadRule, match="is no resource"):
        Resource.parse(text)


@pytest.mark.parametrize(
    "address", ["300.1.1.1", "localhost", "127.0.0.*", "1.2.3.4/33", "", "::/129"]
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(BadRule, match="is no IP address or network"):
        Entry.parse("*", ["All"], [address], "Allow")


def test_actions_and_decisions_are_checked() -> None:
    with pytest.raises(BadRule, match="has no action of all, pub"):
        Entry.parse("*", ["Send", "Any"], [], "Allow")
    with pytest.raises(BadRule, match="is no decision"):
        Entry.parse("*", ["All"], [], "Perhaps")


# -- random rules ----------------------------------------------------------------------------------

NAMES = ["", "o", "or", "orders", "orders2", "other"]
ADDRESSES = ["10.0.0.1", "10.1.0.1", "127.0.0.1", "::1", "2001:db8::1"]
NETWORKS = ["10.0.0.0/8", "10.0.0.1", "::1", "::/0", "0.0.0.0/0", "2001:db8::/32"]
RESOURCES = ["*"] + [
    f"{kind}:{name}{star}" for kind in ("Topic", "Group") for name in NAMES for star in ("", "*")
]
ACTIONS = [action.value for action in Action]

entries = st.builds(
    Entry.parse,
    st.sampled_from(RESOURCES),
    st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=3),
    st.lists(st.sampled_from(NETWORKS), max_size=2),
    st.sampled_from(["Allow", "Deny"]),
)


def naive(
    custom: list[Entry],
    default: list[Entry],
    kind: Kind,
    name: str,
    wanted: frozenset[Action],
    address: str,
) -> bool:
    """Word by word, as the documentation says it."""
    for rules in (custom, default):
        left = []
        for rule in rules:
            if rule.networks:
                inside = False
                for network in rule.networks:
                    inside |= str(network) == "::/0" or ip_address(address) in ip_network(network)
                if not inside:
                    continue
            if not (rule.actions & wanted or Action.ALL in rule.actions):
                continue
            left.append(rule)
        levels = [
            [r for r in left if r.resource == Resource(kind, Pattern.LITERAL, name)],
            *(
                [r for r in left if r.resource == Resource(kind, Pattern.PREFIX, name[:size])]
                for size in range(len(name), 0, -1)
            ),
            [r for r in left if r.resource == Resource(kind, Pattern.ANY, "")],
            [r for r in left if r.resource.kind is Kind.ANY],
        ]
        for level in levels:
            if level:
                return all(rule.decision is Decision.ALLOW for rule in level)
    return False


@given(
    st.lists(entries, max_size=12),
    st.lists(entries, max_size=4),
    st.sampled_from([Kind.TOPIC, Kind.GROUP]),
    st.sampled_from(NAMES),
    st.frozensets(st.sampled_from([*Action][1:]), min_size=1, max_size=3),
    st.sampled_from(ADDRESSES),
)
def test_random_rules_are_decided_as_documented(
    custom: list[Entry],
    default: list[Entry],
    kind: Kind,
    name: str,
    wanted: frozenset[Action],
    address: str,
) -> None:
    rules = Rules(custom, default)
    expected = naive(custom, default, kind, name, wanted, address)
    assert rules.decide(kind, name, wanted, address).is_allowed is expected


@given(st.sampled_from(RESOURCES))
def test_resources_are_written_as_they_are_read(text: str) -> None:
    resource = Resource.parse(text)
    assert Resource.parse(str(resource)) == resource
