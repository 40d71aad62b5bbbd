"""Files of Apache RocketMQ with users and rules: what they become, and what is named or refused."""

from __future__ import annotations

import sys

import pytest

from headrace.admin.acl_files import Imported, parse
from headrace.errors import ConfigurationError
from headrace.rights import ClusterUser, Rule, explain, question

# As Apache RocketMQ 4.9 ships it, with more kinds of lines.
PLAIN_ACL = """
globalWhiteRemoteAddresses:
- 10.10.103.*
- 192.168.0.*

accounts:
- accessKey: RocketMQ
  secretKey: 012345678
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  # the group should convert to retry topic
  - groupA=DENY
  - groupB=PUB|SUB
  - groupC=SUB

- accessKey: rocketmq2
  secretKey: 12345678
  whiteRemoteAddress: 192.168.1.*
  # if it is admin, it could access all resources
  admin: true
"""


def printed(width: tuple[int, ...], *rows: tuple[str, ...]) -> str:
    """Rows as mqadmin 5.5.0 prints them."""
    return "".join(
        "  ".join(f"{cell:{n}}" for cell, n in zip(row, width, strict=True)) + "\n" for row in rows
    )


USERS = printed(
    (16, 22, 22, 22),
    ("#UserName", "#Password", "#UserType", "#UserStatus"),
    ("alice", "secret with  blanks", "Normal", "enable"),
    ("a_user_with_a_long_name", "x", "Super", "disable"),
    ("bob", "null", "Normal", "enable"),
)
RULES = printed(
    (16, 10, 22, 20, 24, 10),
    ("#Subject", "#PolicyType", "#Resource", "#Actions", "#SourceIp", "#Decision"),
    ("User:alice", "Custom", "Topic:orders*", "[Pub, Sub]", "[127.0.0.0/8, 10.0.0.1]", "Allow"),
    ("User:alice", "Default", "Topic:*", "[Get]", "null", "Deny"),
    ("User:dora", "", "", "", "", ""),
    ("User:carol", "Custom", "Group:a_group_of_many_letters", "[Sub]", "null", "Allow"),
)
REPORT = "list acl from 127.0.0.1:10911 success.\n"
TABLES = f"{USERS}get user from 127.0.0.1:10911 success.\n{RULES}{REPORT}"
HEADING, RULE, *_ = RULES.splitlines()


def test_a_plain_acl_becomes_users_with_rules() -> None:
    found = parse(PLAIN_ACL, "plain_acl.yml")
    (note,) = found.notes
    assert note.startswith("globalWhiteRemoteAddresses 10.10.103.*, 192.168.0.*: clients there")
    first, second = found.users
    assert (first.user, first.password) == (ClusterUser("RocketMQ"), "012345678")
    assert first.notes == ()
    assert set(first.rules) == {
        Rule("Topic:topicA", ("All",), decision="Deny"),
        Rule("Topic:topicB", ("Pub", "Sub")),
        Rule("Topic:topicC", ("Sub",)),
        Rule("Topic:*", ("All",), decision="Deny", policy="Default"),
        Rule("Group:groupA", ("All",), decision="Deny"),
        Rule("Group:groupB", ("Pub", "Sub")),
        Rule("Group:groupC", ("Sub",)),
        Rule("Group:*", ("Sub",), policy="Default"),
    }
    assert (second.user, second.rules) == (ClusterUser("rocketmq2", is_super=True), ())
    assert [note.partition(":")[0] for note in second.notes] == [
        "whiteRemoteAddress 192.168.1.*",
        "admin",
    ]


def account(*lines: str) -> Imported:
    text = "".join(f"  {line}\n" for line in lines)
    (found,) = parse(f"accounts:\n- accessKey: a\n{text}", "f").users
    return found


# ACL 1.0: the line of a topic or group alone counts; the default only for those without a line.
WORDS = ("DENY", "PUB", "SUB", "PUB|SUB")


@pytest.mark.parametrize("own", [None, *WORDS])
@pytest.mark.parametrize("default", ["", *WORDS])
@pytest.mark.parametrize("kind", ["Topic", "Group"])
def test_decisions_are_those_of_acl_1(kind: str, default: str, own: str | None) -> None:
    lines = [f"default{kind}Perm: {default}"] if default else []
    lines += [f"{kind.lower()}Perms:", f"- x={own}"] if own else []
    found = account(*lines)
    counts = default if own is None else own
    for action in ("Pub", "Sub"):
        answer = explain(found.user, found.rules, question(action, f"{kind}:x", "10.0.0.1"))
        assert answer.is_allowed == (action.upper() in counts), answer


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("whiteRemoteAddress: 10.0.0.*", "whiteRemoteAddress 10.0.0.*: clients there"),
        ("namespacePerms: [a]", "namespacePerms: not known"),
    ],
)
def test_what_has_no_counterpart_is_a_note(line: str, note: str) -> None:
    (found,) = account(line).notes
    assert found.startswith(note)


def test_a_super_user_has_no_rules() -> None:
    found = account("admin: true", "topicPerms:", "- x=DENY", "defaultGroupPerm: SUB")
    assert (found.user.is_super, found.rules) == (True, ())
    assert [note.partition(":")[0] for note in found.notes] == [
        "admin",
        "defaultGroupPerm",
        "topicPerms",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "f is neither a plain_acl.yml, which has accounts, nor what"),
        ("accounts: 1", "f is neither a plain_acl.yml"),
        ("accounts: [", "f: while parsing"),
        ("accounts:\n- secretKey: x", "f: account 1 has no accessKey"),
        ("accounts: [3]", "f: account 1 has no accessKey"),
        ("accounts:\n- accessKey: a\n- accessKey: a", "f: a has two accounts"),
        ("accounts:\n- accessKey: a\n  topicPerms: [x]", "topicPerms: 'x': expected NAME=PERM"),
        ("accounts:\n- accessKey: a\n  topicPerms: [x=READ]", "topicPerms: x: 'READ' is not one"),
        ("accounts:\n- accessKey: a\n  groupPerms: x=SUB", "groupPerms is no list of GROUP=PERM"),
        ("accounts:\n- accessKey: a\n  defaultTopicPerm: NO", "defaultTopicPerm: 'NO' is not one"),
    ],
)
def test_a_file_that_says_something_else_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse(text, "f")
    assert reason in str(error.value)


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigurationError, match="pip install pyyaml"):
        parse(PLAIN_ACL, "plain_acl.yml")


def test_tables_of_mqadmin_become_users_with_rules() -> None:
    alice, long_name, bob, dora, carol = parse(TABLES, "acl.txt").users
    assert alice == Imported(
        ClusterUser("alice"),
        "secret with  blanks",
        (
            Rule("Topic:orders*", ("Pub", "Sub"), ("127.0.0.0/8", "10.0.0.1")),
            Rule("Topic:*", ("Get",), decision="Deny", policy="Default"),
        ),
    )
    assert long_name.user == ClusterUser("a_user_with_a_long_name", is_super=True, is_enabled=False)
    assert long_name.password == "x"
    assert (bob.user, bob.password) == (ClusterUser("bob"), None)
    assert dora == Imported(ClusterUser("dora"), None, ())
    rule = Rule("Group:a_group_of_many_letters", ("Sub",))
    assert carol == Imported(ClusterUser("carol"), None, (rule,))


def test_brokers_that_agree_are_taken_once_and_others_refused() -> None:
    assert parse(TABLES + TABLES, "f") == parse(TABLES, "f")
    other = TABLES.replace("Normal ", "Super  ")
    with pytest.raises(ConfigurationError, match="line 13: alice is another one"):
        parse(TABLES + other, "f")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("User:a  Custom", "is no row of a rule"),
        (RULE.replace("User:alice", "Role:alice"), "is no row of a rule"),
        (RULE.replace("[Pub, Sub]", "[Read, Su]"), "'Read' is no action"),
        (RULE.replace("Topic:", "Queue:"), "is no resource"),
    ],
)
def test_a_row_that_is_none_is_named(line: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse(f"{HEADING}\n{line}\n", "acl.txt")
    assert str(error.value).startswith("acl.txt: line 2")
    assert reason in str(error.value)


def test_nothing_prints_a_password() -> None:
    assert "012345678" not in repr(parse(PLAIN_ACL, "f"))
