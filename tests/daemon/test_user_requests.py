"""Requests about users and rules: Apache's words and remarks, and what is refused beyond them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_daemon.access.settings import AccessConfig
from headrace_daemon.access.user_requests import UserRequests
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.rights.access import AccessSettings
from headrace_protocol.rights.auth_requests import (
    AclHeader,
    AclInfo,
    DeleteAclHeader,
    ListAclHeader,
    ListUserHeader,
    UserHeader,
    UserInfo,
)
from tests.support.access import CHECKED, ROOT, UsersUnderTest, entry, session

CLUSTER = entry("Cluster:*", "Update", "Get")


@pytest.fixture
def daemon(tmp_path: Path) -> UsersUnderTest:
    """root is Super, alice Normal without rules, carol administers users."""
    daemon = UsersUnderTest(tmp_path)
    daemon.make("alice")
    daemon.make("carol")
    assert daemon.rule("carol", CLUSTER) == (0, "", b"")
    return daemon


def shown(daemon: UsersUnderTest, name: str) -> bytes:
    code, _, body = daemon.ask(Code.AUTH_GET_USER, UserHeader(username=name))
    assert code == 0
    return body


def rules(daemon: UsersUnderTest, name: str) -> bytes:
    code, _, body = daemon.ask(Code.AUTH_GET_ACL, AclHeader(subject=f"User:{name}"))
    assert code == 0
    return body


# -- users -----------------------------------------------------------------------------------------


def test_a_user_is_shown_as_by_apache_but_for_its_password(daemon: UsersUnderTest) -> None:
    assert shown(daemon, "alice") == (
        b'{"userStatus":"enable","userType":"Normal","username":"alice"}'
    )
    assert shown(daemon, "root") == (
        b'{"userStatus":"enable","userType":"Super","username":"root"}'
    )
    assert shown(daemon, "nobody") == b""


def test_only_what_is_given_changes(daemon: UsersUnderTest) -> None:
    before = daemon.users.users["alice"]
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "alice", user_status="DISABLE")[0] == 0
    after = daemon.users.users["alice"]
    assert not after.is_enabled
    assert (after.secret, after.verifier, after.kind) == (
        before.secret,
        before.verifier,
        before.kind,
    )
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "alice", password="other")[0] == 0
    last = daemon.users.users["alice"]
    assert last.secret == "other"
    assert last.verifier != before.verifier
    assert not last.is_enabled


def test_a_password_is_taken_away_and_given(daemon: UsersUnderTest) -> None:
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "alice", no_password=True)[0] == 0
    alice = daemon.users.users["alice"]
    assert (alice.verifier, alice.secret) == (None, None)
    assert b'"noPassword":true' in shown(daemon, "alice")
    assert b'"signatures":false' in shown(daemon, "alice")
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "alice", password="new")[0] == 0
    assert daemon.users.users["alice"].verifier is not None
    assert b"noPassword" not in shown(daemon, "alice")
    for wrong in ({"password": "x"}, {"signatures": True}):
        for code in (Code.AUTH_CREATE_USER, Code.AUTH_UPDATE_USER):
            _, remark, _ = daemon.change_user(code, "carol", no_password=True, **wrong)
            assert "which need one" in remark


def test_users_are_listed_by_name(daemon: UsersUnderTest) -> None:
    _, _, body = daemon.ask(Code.AUTH_LIST_USER, ListUserHeader(filter="o"))
    assert body == (
        b'[{"userStatus":"enable","userType":"Normal","username":"carol"},'
        b'{"userStatus":"enable","userType":"Super","username":"root"}]'
    )
    assert daemon.ask(Code.AUTH_LIST_USER, ListUserHeader(filter="xyz")) == (0, "", b"")


def test_a_deleted_user_takes_its_rules_along(daemon: UsersUnderTest) -> None:
    header = UserHeader(username="carol")
    assert daemon.ask(Code.AUTH_DELETE_USER, header) == (0, "", b"")
    assert daemon.ask(Code.AUTH_DELETE_USER, header) == (0, "", b"")
    daemon.make("carol")
    assert rules(daemon, "carol") == b""


@pytest.mark.parametrize(
    ("code", "name", "fields", "answer"),
    [
        (Code.AUTH_CREATE_USER, "alice", {"password": "x"}, (16, "The user is existed")),
        (Code.AUTH_UPDATE_USER, "dave", {"password": "x"}, (16, "The user is not exist")),
        (Code.AUTH_CREATE_USER, "dave", {}, (16, "password can not be blank")),
        (Code.AUTH_CREATE_USER, "dave", {"password": "  "}, (16, "password can not be blank")),
        (Code.AUTH_UPDATE_USER, "alice", {"password": ""}, (16, "password can not be blank")),
        (Code.AUTH_CREATE_USER, "", {"password": "x"}, (29, "The username is blank")),
        # Apache takes the default for an unknown word.
        (Code.AUTH_CREATE_USER, "dave", {"password": "x", "user_type": "Root"}, (29, "userType")),
        (Code.AUTH_UPDATE_USER, "alice", {"user_status": "off"}, (29, "userStatus 'off'")),
        (Code.AUTH_CREATE_USER, "a\nb", {"password": "x"}, (29, "username 'a\\nb'")),
        (Code.AUTH_CREATE_USER, " alice", {"password": "x"}, (29, "username ' alice'")),
        (Code.AUTH_CREATE_USER, "a" * 256, {"password": "x"}, (29, "username of 256")),
        (Code.AUTH_CREATE_USER, "dave", {"password": "x" * 1025}, (29, "password of 1025")),
        (Code.AUTH_CREATE_USER, "anonymous", {"password": "x"}, (29, "username anonymous")),
        (Code.AUTH_UPDATE_USER, "alice", {"signatures": True}, (29, "signatures=true needs")),
    ],
)
def test_errors_about_users(
    daemon: UsersUnderTest,
    code: Code,
    name: str,
    fields: dict[str, str],
    answer: tuple[int, str],
) -> None:
    found, remark, _ = daemon.change_user(code, name, **fields)
    assert found == answer[0]
    assert remark.startswith(answer[1])


def test_header_and_body_must_name_one_user(daemon: UsersUnderTest) -> None:
    body = UserInfo(username="eve", password="x").encode()
    code, remark, _ = daemon.ask(Code.AUTH_CREATE_USER, UserHeader(username="dave"), body)
    assert (code, remark) == (29, "username 'dave' in the header, 'eve' in the body")
    assert shown(daemon, "eve") == shown(daemon, "dave") == b""


@pytest.mark.parametrize("code", [Code.AUTH_CREATE_USER, Code.AUTH_UPDATE_USER])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"password":{}}'])
def test_a_body_that_is_no_user_is_rejected(
    daemon: UsersUnderTest, code: Code, body: bytes
) -> None:
    assert daemon.ask(code, UserHeader(username="dave"), body)[0] == 29
    assert not daemon.unexpected


# -- Super users -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "name", "fields", "answer"),
    [
        (
            Code.AUTH_CREATE_USER,
            "dave",
            {"password": "x", "user_type": "Super"},
            (1, "The super user can only be create by super user"),
        ),
        (
            Code.AUTH_UPDATE_USER,
            "alice",
            {"user_type": "Super"},
            (1, "The super user can only be update by super user"),
        ),
        (
            Code.AUTH_UPDATE_USER,
            "root",
            {"password": "mine"},
            (16, "The super user can only be update by super user"),
        ),
    ],
)
def test_only_super_users_change_super_users(
    daemon: UsersUnderTest, code: Code, name: str, fields: dict[str, str], answer: tuple[int, str]
) -> None:
    assert daemon.change_user(code, name, "carol", **fields)[:2] == answer
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "alice", "carol", user_status="disable") == (
        0,
        "",
        b"",
    )


def test_a_normal_user_neither_deletes_a_super_user_nor_changes_its_rules(
    daemon: UsersUnderTest,
) -> None:
    only = (16, "The super user can only be update by super user", b"")
    assert daemon.ask(Code.AUTH_DELETE_USER, UserHeader(username="root"), by="carol") == only
    assert daemon.rule("root", entry("*", "All", decision="Deny"), by="carol") == only


@pytest.mark.parametrize("fields", [{"user_type": "Normal"}, {"user_status": "disable"}, None])
def test_the_last_enabled_super_user_stays(
    daemon: UsersUnderTest, fields: dict[str, str] | None
) -> None:
    def lose(name: str) -> tuple[int, str, bytes]:
        if fields is None:
            return daemon.ask(Code.AUTH_DELETE_USER, UserHeader(username=name))
        return daemon.change_user(Code.AUTH_UPDATE_USER, name, **fields)

    daemon.make("second", user_type="Super", user_status="disable")
    code, remark, _ = lose("root")
    assert code == 16
    assert "root is the last enabled Super user" in remark
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "second", user_status="enable")[0] == 0
    assert lose("second")[0] == 0
    assert lose("root")[0] == 16


# -- passwords -------------------------------------------------------------------------------------


def test_no_answer_has_a_password(daemon: UsersUnderTest) -> None:
    secured = session("root", is_encrypted=True)
    for code in (Code.AUTH_GET_USER, Code.AUTH_LIST_USER):
        _, _, body = daemon.ask(code, UserHeader(username="alice"), by=secured)
        assert b"alice" in body
        assert b"password" not in body


@pytest.mark.parametrize(
    ("exports", "by", "is_encrypted", "has_password"),
    [
        (True, "root", True, True),
        (True, "root", False, False),
        (True, "carol", True, False),
        (False, "root", True, False),
    ],
)
def test_passwords_are_exported_to_super_users_over_tls(
    tmp_path: Path, exports: bool, by: str, is_encrypted: bool, has_password: bool
) -> None:
    daemon = UsersUnderTest(tmp_path, AccessConfig(CHECKED, ROOT, exports=exports))
    daemon.make("carol")
    daemon.make("dave", signatures=False)
    assert daemon.rule("carol", CLUSTER)[0] == 0
    channel = session(by, is_encrypted=is_encrypted)
    _, _, body = daemon.ask(Code.AUTH_GET_USER, UserHeader(username="carol"), by=channel)
    assert (UserInfo.decode(body).password == "carol-password") is has_password
    _, _, body = daemon.ask(Code.AUTH_GET_USER, UserHeader(username="dave"), by=channel)
    assert UserInfo.decode(body).password is None


def test_a_user_without_signatures_has_a_verifier_only(daemon: UsersUnderTest) -> None:
    daemon.make("dave", password="dave-password", signatures=False)
    assert daemon.users.users["dave"].secret is None
    assert b'"signatures":false' in shown(daemon, "dave")
    assert b"dave-password" not in daemon.path.read_bytes()
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "dave", password="other-one")[0] == 0
    assert b"other-one" not in daemon.path.read_bytes()
    changed = daemon.change_user(
        Code.AUTH_UPDATE_USER, "dave", password="third-one", signatures=True
    )
    assert changed[0] == 0
    assert daemon.users.users["dave"].secret == "third-one"
    assert daemon.change_user(Code.AUTH_UPDATE_USER, "dave", signatures=False)[0] == 0
    assert b"third-one" not in daemon.path.read_bytes()


# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [Code.AUTH_CREATE_ACL, Code.AUTH_UPDATE_ACL])
def test_rules_are_merged_by_resource(daemon: UsersUnderTest, code: Code) -> None:
    first = entry("Topic:orders*", "Pub", addresses=["127.0.0.0/8"])
    assert daemon.rule("alice", first, entry("Group:g", "Sub"), code=code)[0] == 0
    assert daemon.rule("alice", entry("topic:orders*", "sub", decision="deny"), code=code)[0] == 0
    assert rules(daemon, "alice") == (
        b'{"policies":[{"entries":[{"actions":["Sub"],"decision":"Deny","resource":"Topic:orders*"}'
        b',{"actions":["Sub"],"decision":"Allow","resource":"Group:g"}],"policyType":"Custom"}],'
        b'"subject":"User:alice"}'
    )


def test_rules_of_one_resource_in_one_request_are_both_kept(daemon: UsersUnderTest) -> None:
    both = entry("Topic:a", "Pub"), entry("Topic:a", "Sub", decision="Deny")
    assert daemon.rule("alice", *both)[0] == 0
    (policy,) = AclInfo.decode(rules(daemon, "alice")).policies
    assert [each.actions for each in policy.entries] == [["Pub"], ["Sub"]]


def test_rules_are_in_force_for_the_next_request(daemon: UsersUnderTest) -> None:
    ask = Code.AUTH_LIST_USER, ListUserHeader()
    assert daemon.ask(*ask, by="alice")[0] == 16
    assert daemon.rule("alice", entry("Cluster:c0", "Get"))[0] == 0
    assert daemon.ask(*ask, by="alice")[0] == 0
    deleted = daemon.ask(Code.AUTH_DELETE_ACL, DeleteAclHeader(subject="User:alice"))
    assert deleted == (0, "", b"")
    assert daemon.ask(*ask, by="alice")[0] == 16


def test_rules_are_deleted_by_type_and_resource(daemon: UsersUnderTest) -> None:
    def delete(resource: str = "", policy_type: str = "") -> tuple[int, str, bytes]:
        header = DeleteAclHeader(subject="User:alice", resource=resource, policy_type=policy_type)
        return daemon.ask(Code.AUTH_DELETE_ACL, header)

    for kind in (None, "Default"):
        assert daemon.rule("alice", entry("Topic:a", "Pub"), kind=kind)[0] == 0
    assert delete("Topic:b") == (0, "", b"")
    assert delete("topic:a") == (0, "", b"")
    (policy,) = AclInfo.decode(rules(daemon, "alice")).policies
    assert policy.policy_type == "Default"
    assert delete("Topic:a", "default") == (0, "", b"")
    assert rules(daemon, "alice") == b""
    assert delete() == (16, "The acl is not exist.", b"")


def test_rules_are_listed_by_parts_of_subject_and_resource(daemon: UsersUnderTest) -> None:
    assert daemon.rule("alice", entry("Topic:a", "Pub"), entry("Group:g", "Sub"))[0] == 0

    def listed(subject: str = "", resource: str = "") -> list[tuple[str | None, list[str | None]]]:
        header = ListAclHeader(subject_filter=subject, resource_filter=resource)
        code, _, body = daemon.ask(Code.AUTH_LIST_ACL, header)
        assert code == 0
        found = [AclInfo.decode(each) for each in _items(body)]
        return [
            (each.subject, [one.resource for one in each.policies[0].entries]) for each in found
        ]

    assert listed() == [
        ("User:alice", ["Topic:a", "Group:g"]),
        ("User:carol", ["Cluster:*"]),
    ]
    assert listed("ali", "Topic") == [("User:alice", ["Topic:a"])]
    assert listed("carol", "Topic") == []
    assert daemon.ask(Code.AUTH_LIST_ACL, ListAclHeader(subject_filter="zed")) == (0, "", b"")


def _items(body: bytes) -> list[bytes]:
    import msgspec

    return [bytes(each) for each in msgspec.json.decode(body or b"[]", type=list[msgspec.Raw])]


def test_a_list_that_fits_no_frame_is_refused(daemon: UsersUnderTest) -> None:
    assert isinstance(daemon.requests, UserRequests)
    daemon.requests.list_bytes_max = 100
    code, remark, body = daemon.ask(Code.AUTH_LIST_USER, ListUserHeader())
    assert (code, body) == (29, b"")
    assert remark == "the answer has over 100 bytes, the maximum: ask for a part, by a filter"
    assert daemon.ask(Code.AUTH_LIST_USER, ListUserHeader(filter="ali"))[0] == 0


@pytest.mark.parametrize("by", ["root", "carol"])
def test_nobody_but_a_super_user_changes_its_own_rules(daemon: UsersUnderTest, by: str) -> None:
    code, remark, _ = daemon.rule(by, entry("*", "All"), by=by)
    deleted = daemon.ask(Code.AUTH_DELETE_ACL, DeleteAclHeader(subject=f"User:{by}"), by=by)
    if by == "root":
        assert (code, deleted[0]) == (0, 0)
    else:
        assert (code, remark) == (16, "User:carol may not change its own rules: ask a Super user")
        assert deleted[:2] == (code, remark)


@pytest.mark.parametrize(
    ("subject", "body", "answer"),
    [
        ("User:x", '"subject":"User:x",', (16, "The subject of User:x is not exist.")),
        ("alice", '"subject":"alice",', (16, "The subject is null.")),
        ("", "", (16, "The subject is null.")),
        ("User:alice", '"subject":"User:carol",', (16, "The subject is User:alice in the header")),
    ],
)
def test_errors_about_subjects(
    daemon: UsersUnderTest, subject: str, body: str, answer: tuple[int, str]
) -> None:
    text = (
        "{" + body + '"policies":[{"entries":[{"actions":["Pub"],"decision":"Allow",'
        '"resource":"*"}]}]}'
    )
    found, remark, _ = daemon.ask(Code.AUTH_CREATE_ACL, AclHeader(subject=subject), text.encode())
    assert found == answer[0]
    assert remark.startswith(answer[1])


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"", (1, "The body of acl is null")),
        (b'{"policies":[]}', (16, "The policies is empty.")),
        (b'{"policies":[{"entries":[]}]}', (16, "The policies is empty.")),
        (
            b'{"policies":[{"entries":[{"actions":["Pub"],"decision":"Allow","resource":"x"}]}]}',
            (16, "The resource is null. 'x' is no resource"),
        ),
    ],
)
def test_errors_about_rules(daemon: UsersUnderTest, body: bytes, answer: tuple[int, str]) -> None:
    header = AclHeader(subject="User:alice")
    found, remark, _ = daemon.ask(Code.AUTH_UPDATE_ACL, header, body)
    assert found == answer[0]
    assert remark.startswith(answer[1])


def test_rules_of_nobody_are_refused(daemon: UsersUnderTest) -> None:
    missing = (16, "The subject is not exist.", b"")
    assert daemon.ask(Code.AUTH_GET_ACL, AclHeader(subject="User:x")) == missing
    assert daemon.ask(Code.AUTH_DELETE_ACL, DeleteAclHeader(subject="User:x")) == missing
    assert daemon.ask(Code.AUTH_GET_ACL, AclHeader(subject="x"))[1].startswith(
        "The subject is null."
    )


def test_the_rules_of_a_user_are_bounded(daemon: UsersUnderTest) -> None:
    for start in range(0, 1000, 500):
        many = [entry(f"Topic:t{number}", "Pub") for number in range(start, start + 500)]
        assert daemon.rule("alice", *many)[0] == 0
    code, remark, _ = daemon.rule("alice", entry("Topic:one-more", "Pub"))
    assert code == 29
    assert remark.startswith("1001 rules of User:alice: the maximum is 1000")


def test_a_daemon_without_authentication_keeps_no_users(tmp_path: Path) -> None:
    daemon = UsersUnderTest(tmp_path, AccessConfig(AccessSettings(anonymous="allow")))
    for code in Code:
        if 3001 <= code <= 3010:
            found, remark, _ = daemon.ask(code)
            assert found == 16
            assert remark.startswith("authenticationEnabled=false: this daemon keeps no users")
    assert not daemon.path.exists()
