"""Rules as operators write them, and why one decides."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigurationError
from headrace.rights import ClusterUser, Rule, explain, question

ALICE = ClusterUser("alice")
PUB_ORDERS = Rule("Topic:orders", ("Pub",))


def allowed(rules: list[Rule], asked: str, user: ClusterUser | None = ALICE) -> tuple[bool, str]:
    """The answer to "ACTION RESOURCE IP", and the rule that decides, or the reason."""
    answer = explain(user, rules, question(*asked.split()))
    return answer.is_allowed, str(answer.rule or answer.reason)


def test_the_closest_rule_decides_and_is_named() -> None:
    rules = [
        Rule("*", ("All",)),
        Rule("Topic:*", ("Sub",), decision="Deny"),
        Rule("Topic:ord*", ("Sub",), ("10.0.0.0/8",)),
    ]
    assert allowed(rules, "Sub Topic:orders 10.1.1.1") == (
        True,
        "Allow Sub on Topic:ord* from 10.0.0.0/8",
    )
    assert allowed(rules, "Sub Topic:orders 11.1.1.1") == (False, "Deny Sub on Topic:*")
    assert allowed(rules, "Pub Topic:orders 11.1.1.1") == (True, "Allow All on *")


def test_a_default_rule_counts_where_no_other_speaks() -> None:
    same = ("Topic:orders", ("Pub",))
    default = Rule(*same, decision="Deny", policy="Default")
    assert allowed([default], "Pub Topic:orders ::1") == (
        False,
        "Deny Pub on Topic:orders (Default)",
    )
    assert allowed([default, Rule(*same)], "Pub Topic:orders ::1")[0]
    # The same words in both policies.
    both = [Rule(*same, policy="Default"), Rule(*same)]
    assert allowed(both, "Pub Topic:orders ::1") == (True, "Allow Pub on Topic:orders")


@pytest.mark.parametrize(
    ("user", "answer"),
    [
        (
            None,
            (
                False,
                "there is no such user; without one, anonymousAccess counts",
            ),
        ),
        (ClusterUser("alice", is_super=True), (True, "a Super user may do everything")),
        (ClusterUser("alice", is_super=True, is_enabled=False), (False, "the user is disabled")),
        (ALICE, (False, "no rule speaks of it")),
    ],
)
def test_without_a_rule_the_reason_is_given(
    user: ClusterUser | None, answer: tuple[bool, str]
) -> None:
    assert allowed([PUB_ORDERS], "Sub Topic:orders 127.0.0.1", user) == answer


def test_reading_without_a_group_needs_no_right_to_one() -> None:
    assert allowed([], "Sub Group:headrace_reader ::1") == (
        True,
        "every user may read in this group, which stands for none",
    )
    assert not allowed([], "Delete Group:headrace_reader ::1")[0]


@pytest.mark.parametrize("topic", ["%RETRY%billing", "%DLQ%billing"])
def test_topics_of_a_group_count_as_the_group(topic: str) -> None:
    rules = [Rule("Topic:*", ("All",), decision="Deny"), Rule("Group:billing", ("Sub",))]
    assert allowed(rules, f"Sub Topic:{topic} 127.0.0.1")[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("Read Topic:a ::1", "'Read' is no action: expected one of All, Pub"),
        ("Pub Queue:a ::1", "'Queue:a' is no resource"),
        ("Pub Topic:a* ::1", "resource Topic:a*: name a single one"),
        ("Pub Topic: ::1", "resource Topic:: name a single one"),
        ("Pub * ::1", "resource *: name a single one"),
        ("Pub Topic:a localhost", "'localhost' is no IP address"),
        (
            "Sub Topic:SCHEDULE_TOPIC_XXXX ::1",
            "Topic:SCHEDULE_TOPIC_XXXX is the brokers' own, so it counts as their cluster: ask",
        ),
        ("Pub Topic:a 10.0.0.0/8", "address 10.0.0.0/8: name a single one"),
    ],
)
def test_a_question_names_one_thing(asked: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        question(*asked.split())
    assert str(error.value).startswith(reason)


def test_words_get_their_proper_case() -> None:
    given = Rule("topic:**", ("SUB", "pub"), ("10.0.0.1",), "deny", "default")
    assert given.checked() == Rule("Topic:*", ("Pub", "Sub"), ("10.0.0.1",), "Deny", "Default")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Rule("Topic:a", ("Pub", "Read")), "'Read' is no action"),
        (Rule("Topic:a", ()), "has no action of"),
        (Rule("Queue:a", ("Pub",)), "'Queue:a' is no resource"),
        (Rule("Topic:a", ("Pub",), ("300.1.1.1",)), "'300.1.1.1' is no IP address"),
        (Rule("Topic:a", ("Pub",), decision="Maybe"), "'Maybe' is no decision"),
        (Rule("Topic:a", ("Pub",), policy="Special"), "'Special' is no policy"),
    ],
)
def test_a_rule_of_other_words_is_refused(rule: Rule, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        rule.checked()
