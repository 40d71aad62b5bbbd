"""Users and rules in requests: the words of Apache's mqadmin, and what is rejected of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_protocol.rights.auth_requests import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from headrace_protocol.rights.auth_rules import acl_info, entry_of, rules_of, user_of
from headrace_protocol.rights.rules import BadRule, Rules

# As mqadmin 5.5.0 sends it.
SENT = (
    b'{"policies":[{"entries":[{"actions":["Pub","Sub"],"decision":"Allow",'
    b'"resource":"Topic:orders*","sourceIps":["127.0.0.0/8"]}]}],"subject":"User:alice"}'
)
# As Apache's broker answers.
SHOWN = (
    b'{"policies":[{"entries":[{"actions":["Pub","Sub"],"decision":"Allow",'
    b'"resource":"Topic:orders*","sourceIps":["127.0.0.0/8"]}],"policyType":"Custom"}],'
    b'"subject":"User:alice"}'
)


def rule(**words: object) -> PolicyEntryInfo:
    return msgspec.structs.replace(
        PolicyEntryInfo(actions=["Pub"], decision="Allow", resource="Topic:orders"), **words
    )


def test_rules_are_answered_as_they_were_sent() -> None:
    shown = acl_info("alice", rules_of(AclInfo.decode(SENT)))
    assert shown is not None
    assert shown.encode() == msgspec.json.encode(shown) == SHOWN


def test_words_in_any_case_are_shown_in_the_proper_one() -> None:
    words = PolicyEntryInfo(actions=["SUB", "pub"], decision="deny", resource="topic:**")
    shown = acl_info("a", rules_of(AclInfo(policies=[PolicyInfo(entries=[words])])))
    assert shown is not None
    (entry,) = shown.policies[0].entries
    assert entry == PolicyEntryInfo(actions=["Pub", "Sub"], decision="Deny", resource="Topic:*")


def test_types_of_policies_are_kept_apart() -> None:
    both = [PolicyInfo(entries=[rule()], policy_type=kind) for kind in ("default", None)]
    rules = rules_of(AclInfo(policies=both))
    assert rules.custom == rules.default == (entry_of(rule()),)
    shown = acl_info("a", rules)
    assert shown is not None
    assert [each.policy_type for each in shown.policies] == ["Custom", "Default"]


def test_only_resources_with_a_text_are_shown() -> None:
    entries = [rule(), rule(resource="Group:billing")]
    rules = rules_of(AclInfo(policies=[PolicyInfo(entries=entries)]))
    shown = acl_info("a", rules, "bill")
    assert shown is not None
    assert [each.resource for each in shown.policies[0].entries] == ["Group:billing"]
    assert acl_info("a", rules, "nothing") is None


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ({"resource": None}, "The resource is null."),
        ({"resource": "*:*"}, "The resource is null."),
        ({"resource": "Queue:a"}, "The resource is null. 'Queue:a' is no resource"),
        # Taken by Apache as a name that no topic has, so that a Deny denies nothing.
        ({"resource": "Topic"}, "The resource is null. 'Topic' names nothing"),
        ({"resource": "Topic:"}, "The resource is null. 'Topic:' names nothing"),
        ({"resource": "Topic:a*b"}, "The resource is null. 'Topic:a*b'"),
        ({"resource": "Topic:a b"}, "The resource is null. 'Topic:a b'"),
        ({"resource": "Topic:orders "}, "The resource is null. 'Topic:orders '"),
        ({"resource": "Topic:" + 256 * "a"}, "The resource is null."),
        ({"actions": []}, "The actions is empty."),
        ({"actions": ["any"]}, "The actions can not be Any."),
        # Left out by Apache, and thus a rule of less than it says.
        ({"actions": ["Pub", "Read"]}, "The actions is empty. 'read' is no action"),
        ({"actions": ["Unknown"]}, "The actions is empty. 'unknown' is no action"),
        ({"decision": None}, "The decision is null or illegal."),
        ({"decision": "Maybe"}, "The decision is null or illegal. 'Maybe'"),
        ({"source_ips": [""]}, "The source ip is empty."),
        ({"source_ips": ["300.1.1.1"]}, "The source ip is invalid. '300.1.1.1'"),
        ({"source_ips": ["127.0.0.*"]}, "The source ip is invalid."),
        ({"source_ips": ["localhost"]}, "The source ip is invalid."),
        ({"source_ips": ["1.2.3.4/33"]}, "The source ip is invalid."),
        ({"source_ips": 101 * ["1.2.3.4"]}, "101 addresses: the maximum"),
    ],
)
def test_a_rule_that_says_something_else_is_rejected(words: dict[str, object], remark: str) -> None:
    with pytest.raises(BadRule) as raised:
        entry_of(rule(**words))
    assert str(raised.value).startswith(remark)


def test_an_unknown_type_of_policy_is_rejected() -> None:
    with pytest.raises(BadRule, match="'Special' is no type of policy"):
        rules_of(AclInfo(policies=[PolicyInfo(entries=[rule()], policy_type="Special")]))


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.0/24", "::1", "2001:db8::/32"])
def test_addresses_are_shown_as_users_write_them(address: str) -> None:
    shown = acl_info(
        "a", rules_of(AclInfo(policies=[PolicyInfo(entries=[rule(source_ips=[address])])]))
    )
    assert shown is not None
    assert shown.policies[0].entries[0].source_ips == [address]


def test_subjects_are_users() -> None:
    assert user_of("User:alice") == user_of("user:alice") == "alice"
    assert user_of("User:a:b") == "a:b"
    for subject in ("", "alice", "User:", "Role:alice"):
        with pytest.raises(BadRule, match=r"The subject is null\."):
            user_of(subject)


def test_a_user_is_printed_without_its_password() -> None:
    info = UserInfo.decode(b'{"password":"alicepw","username":"alice","userType":"Super"}')
    assert info.password == "alicepw"
    assert "alicepw" not in repr(info)
    assert info.encode() == b'{"password":"alicepw","userType":"Super","username":"alice"}'


WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "*", "All", "any", "Pub", "sub", "Deny", "Topic:a*", "Group:", "::/0"]),
)


@given(actions=st.lists(WORDS, max_size=3), words=st.lists(WORDS, min_size=3, max_size=5))
def test_any_words_are_a_rule_or_are_rejected(actions: list[str], words: list[str]) -> None:
    resource, decision, *addresses = words
    try:
        entry = entry_of(
            PolicyEntryInfo(
                actions=actions, resource=resource, decision=decision, source_ips=addresses
            )
        )
    except BadRule:
        return
    shown = acl_info("a", Rules([entry]))
    assert shown is not None
    assert rules_of(shown).custom == (entry,)
