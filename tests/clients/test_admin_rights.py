"""Users and rules of a cluster: who is asked, and what is said of daemons that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace import blocking
from headrace.errors import (
    AccessDenied,
    BrokerError,
    ChangedInPart,
    ConfigurationError,
    NotEverywhere,
    RuleNotFound,
    UserExists,
    UserNotFound,
)
from headrace.rights import ClusterUser, Rule
from headrace_protocol.bodies import BrokerData, ClusterInfo, KVTable
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.departed import DepartedBroker
from headrace_protocol.rights.auth_requests import UserInfo
from headrace_protocol.rights.auth_rules import acl_info
from headrace_protocol.rights.rules import Entry, Rules
from headrace_protocol.serving import Reply
from tests.support.cli import fail, headrace, succeed
from tests.support.scripted import Scripted, scripted_in_thread

# Tells a daemon that a client is headrace's.
OURS = "headrace"
APACHE = Reply(code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark="not supported")
FULL = Reply(code=ResponseCode.SERVICE_NOT_AVAILABLE, remark="the disk is full")


OFF = Reply(code=ResponseCode.NO_PERMISSION, remark="authenticationEnabled=false: no users")


def refusal(remark: str) -> Reply:
    return Reply(code=ResponseCode.NO_PERMISSION, remark=remark)


class Keepers:
    """A nameserver, the master and a slave of broker a, and the master of broker b."""

    def __init__(self, servers: list[Scripted]) -> None:
        self.nameserver, self.master, self.slave, self.other = self.all = servers
        self.names = ["a:0", "a:1", "b:0", f"nameserver {self.nameserver.address}"]
        self.set_cluster()
        info = Reply(body=(KVTable(table={"tierOpen": "true"}).encode(),))
        self.answer(RequestCode.GET_BROKER_RUNTIME_INFO, info)

    def set_cluster(self, *departed: DepartedBroker) -> None:
        addresses = {"a": [self.master.address, self.slave.address], "b": [self.other.address]}
        cluster = ClusterInfo(
            broker_addr_table={
                name: BrokerData(cluster="c", broker_name=name, broker_addrs=dict(enumerate(at)))
                for name, at in addresses.items()
            },
            departed_brokers=list(departed),
        )
        reply = Reply(body=(cluster.encode(strict=True),))
        self.nameserver.answer(RequestCode.GET_BROKER_CLUSTER_INFO, reply)

    def answer(self, code: int, reply: Reply) -> None:
        for each in self.all:
            each.answer(code, reply)

    def asked(self, code: int) -> list[tuple[dict[str, str], bytes]]:
        """Fields and body of the last such request at each of them."""
        last = [each.last(code) for each in self.all]
        return [
            ({key: each.ext[key] for key in each.ext if key != OURS}, each.body) for each in last
        ]


@pytest.fixture
def keepers() -> Iterator[Keepers]:
    with scripted_in_thread(4) as servers:
        yield Keepers(servers)


@pytest.fixture
def admin(keepers: Keepers) -> Iterator[blocking.Admin]:
    with blocking.Admin(nameserver=keepers.nameserver.address) as admin:
        yield admin


def users(*infos: UserInfo) -> Reply:
    return Reply(body=(msgspec.json.encode(list(infos)),) if infos else ())


def rules(name: str, *entries: Entry) -> Reply:
    return Reply(body=(msgspec.json.encode([acl_info(name, Rules(entries))]),))


ALICE = UserInfo(username="alice", user_type="Normal", user_status="enable")
ROOT = UserInfo(username="root", user_type="Super", user_status="disable", signatures=False)
PUB = Entry.parse("Topic:orders", ["Pub"], [], "Allow")
SUB = Entry.parse("Topic:orders", ["Sub"], ["10.0.0.0/8"], "Deny")


# -- changes ---------------------------------------------------------------------------------------


def test_a_change_goes_to_every_daemon_as_apaches_tools_send_it(
    keepers: Keepers, admin: blocking.Admin
) -> None:
    assert admin.create_user("alice", "secret") == []
    assert keepers.asked(RequestCode.AUTH_CREATE_USER) == 4 * [
        (
            {"username": "alice"},
            b'{"password":"secret","userStatus":"enable","userType":"Normal","username":"alice"}',
        )
    ]
    admin.create_user("root", "secret", is_super=True, signs=False)
    _, body = keepers.asked(RequestCode.AUTH_CREATE_USER)[0]
    assert (b'"signatures":false' in body, b'"Super"' in body) == (True, True)
    admin.update_user("alice", is_enabled=False)
    _, body = keepers.asked(RequestCode.AUTH_UPDATE_USER)[3]
    assert body == b'{"userStatus":"disable","username":"alice"}'
    rule = Rule("topic:orders*", ("pub", "Sub"), ("127.0.0.0/8",))
    admin.set_rules("alice", [rule])
    assert keepers.asked(RequestCode.AUTH_UPDATE_ACL) == 4 * [
        (
            {"subject": "User:alice"},
            (
                b'{"policies":[{"entries":[{"actions":["Pub","Sub"],"decision":"Allow",'
                b'"resource":"Topic:orders*","sourceIps":["127.0.0.0/8"]}],"policyType":"Custom"}],'
                b'"subject":"User:alice"}'
            ),
        )
    ]


def test_what_is_deleted_is_there_somewhere(keepers: Keepers, admin: blocking.Admin) -> None:
    with pytest.raises(UserNotFound):
        admin.delete_user("alice")
    with pytest.raises(RuleNotFound, match="user alice has no rule for Topic:orders;"):
        admin.remove_rules("alice", "Topic:orders")
    keepers.other.answer(RequestCode.AUTH_LIST_USER, users(ALICE))
    keepers.other.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB))
    admin.delete_user("alice")
    assert keepers.asked(RequestCode.AUTH_DELETE_USER) == 4 * [({"username": "alice"}, b"")]
    with pytest.raises(RuleNotFound):
        admin.remove_rules("alice", "Topic:orders", policy="Default")
    admin.remove_rules("alice", "Topic:orders")
    admin.remove_rules("alice")
    sent = [each.ext for each in keepers.master.asked if each.code == RequestCode.AUTH_DELETE_ACL]
    assert sent[0] == {"subject": "User:alice", "policyType": "Custom", "resource": "Topic:orders"}
    assert not sent[1].get("resource")


def test_a_nameserver_without_users_is_skipped_and_named(
    keepers: Keepers, admin: blocking.Admin
) -> None:
    for code in (RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_LIST_USER):
        keepers.nameserver.answer(code, APACHE)
    assert admin.create_user("alice", "secret") == [keepers.names[-1]]
    assert list(admin.users()) == keepers.names[:-1]
    # A broker of Apache's without users is no such thing, one without authentication is.
    keepers.slave.answer(RequestCode.AUTH_CREATE_USER, OFF)
    assert admin.create_user("alice", "secret") == [keepers.names[1], keepers.names[-1]]
    keepers.master.answer(RequestCode.AUTH_CREATE_USER, APACHE)
    with pytest.raises(ChangedInPart, match="a:0"):
        admin.create_user("alice", "secret")


def test_a_daemon_that_fails_is_named_after_all_were_asked(
    keepers: Keepers, admin: blocking.Admin
) -> None:
    keepers.master.answer(RequestCode.AUTH_UPDATE_USER, FULL)
    with pytest.raises(ChangedInPart) as error:
        admin.update_user("alice", is_super=True)
    assert error.value.done == tuple(keepers.names[1:])
    assert list(error.value.failures) == ["a:0"]
    text = str(error.value)
    assert text.startswith(f"user alice is changed at {', '.join(keepers.names[1:])}, but not")
    assert "a:0: AUTH_UPDATE_USER at" in text
    assert "the disk is full" in text


@pytest.mark.parametrize(
    ("remark", "kind"),
    [
        ("The user is existed", UserExists),
        ("The user is not exist", UserNotFound),
        ("The subject of User:alice is not exist.", UserNotFound),
        (
            "User:x has no permission to access Cluster:c from ::1, no matched policies.",
            AccessDenied,
        ),
        ("The acl is not exist.", BrokerError),
    ],
)
def test_what_all_refuse_is_one_error(
    keepers: Keepers, admin: blocking.Admin, remark: str, kind: type[Exception]
) -> None:
    keepers.answer(RequestCode.AUTH_CREATE_USER, refusal(remark))
    with pytest.raises(kind) as error:
        admin.create_user("alice", "secret")
    assert type(error.value) is kind
    assert "secret" not in str(error.value)


def test_brokers_that_left_are_named(keepers: Keepers, admin: blocking.Admin) -> None:
    keepers.set_cluster(DepartedBroker(broker_name="gone", how="SILENT", since=1))
    with pytest.raises(NotEverywhere, match=r"user alice is created on the daemons .* broker gone"):
        admin.create_user("alice", "secret")
    assert len(keepers.asked(RequestCode.AUTH_CREATE_USER)) == 4


def test_without_authentication_anywhere_nothing_can_be_changed(
    keepers: Keepers, admin: blocking.Admin
) -> None:
    keepers.answer(RequestCode.AUTH_CREATE_USER, OFF)
    keepers.nameserver.answer(RequestCode.AUTH_CREATE_USER, APACHE)
    with pytest.raises(BrokerError, match="authenticationEnabled=false"):
        admin.create_user("alice", "secret")


def test_nothing_to_change_is_refused(keepers: Keepers, admin: blocking.Admin) -> None:
    with pytest.raises(ConfigurationError, match="nothing of user alice"):
        admin.update_user("alice")
    assert not keepers.master.count(RequestCode.AUTH_UPDATE_USER)


# -- lists -----------------------------------------------------------------------------------------


def test_lists_are_by_daemon(keepers: Keepers, admin: blocking.Admin) -> None:
    keepers.master.answer(RequestCode.AUTH_LIST_USER, users(ROOT, ALICE))
    keepers.master.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB, SUB))
    alice = ClusterUser("alice")
    root = ClusterUser("root", is_super=True, is_enabled=False, signs=False)
    nothing: dict[str, Any] = {name: {} for name in keepers.names}
    assert admin.users() == nothing | {"a:0": {"alice": alice, "root": root}}
    pub = Rule("Topic:orders", ("Pub",))
    sub = Rule("Topic:orders", ("Sub",), ("10.0.0.0/8",), "Deny")
    assert admin.rules() == nothing | {"a:0": {"alice": [pub, sub]}}


def test_a_daemon_that_gives_no_list_is_an_error_or_a_problem(
    keepers: Keepers, admin: blocking.Admin
) -> None:
    keepers.nameserver.answer(RequestCode.AUTH_LIST_USER, FULL)
    with pytest.raises(BrokerError):
        admin.users()
    problems: list[Any] = []
    assert list(admin.users(problems=problems)) == keepers.names[:-1]
    (problem,) = problems
    assert str(problem).startswith(f"{keepers.names[-1]}: AUTH_LIST_USER at")


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def environment(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", keepers.nameserver.address)


@pytest.mark.usefixtures("environment")
def test_lists_say_where_daemons_differ(keepers: Keepers) -> None:
    keepers.answer(RequestCode.AUTH_LIST_USER, users(ALICE))
    keepers.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB))
    assert succeed("acl", "user", "list").stdout.splitlines() == [
        "user\tkind\tenabled\tsigns\tpassword",
        "alice\tNormal\tyes\tyes\tyes",
    ]
    assert succeed("acl", "rule", "list").rows() == [
        ["alice", "Topic:orders", "Pub", "Allow", "-", "Custom"]
    ]
    keepers.other.answer(RequestCode.AUTH_LIST_USER, users(ALICE, ROOT))
    keepers.other.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB, SUB))
    assert succeed("acl", "user", "list", "--json").json()[1] == {
        "user": "root",
        "kind": "Super",
        "enabled": False,
        "signs": False,
        "password": True,
        "only_at": ["b:0"],
    }
    assert succeed("acl", "rule", "list", "alice").rows() == [
        ["alice", "Topic:orders", "Pub", "Allow", "-", "Custom", "-"],
        ["alice", "Topic:orders", "Sub", "Deny", "10.0.0.0/8", "Custom", "b:0"],
    ]
    assert succeed("acl", "rule", "list", "bob").stderr == "user bob has no rules\n"


@pytest.mark.usefixtures("environment")
def test_a_user_is_made_without_a_password_or_loses_it(keepers: Keepers) -> None:
    succeed("acl", "user", "create", "reports", "--no-password")
    _, body = keepers.asked(RequestCode.AUTH_CREATE_USER)[0]
    assert body == (
        b'{"noPassword":true,"userStatus":"enable","userType":"Normal","username":"reports"}'
    )
    succeed("acl", "user", "update", "reports", "--no-password")
    _, body = keepers.asked(RequestCode.AUTH_UPDATE_USER)[0]
    assert body == b'{"noPassword":true,"username":"reports"}'
    for words in (("create", "--password-file", "pw"), ("update", "--password")):
        assert "give one of them" in fail(
            2, "acl", "user", words[0], "a", *words[1:], "--no-password"
        )


@pytest.mark.usefixtures("environment")
def test_explain_names_the_rule_and_daemons_that_differ(keepers: Keepers) -> None:
    keepers.answer(RequestCode.AUTH_LIST_USER, users(ALICE))
    keepers.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB))
    asked = ("acl", "explain", "alice", "pub", "Topic:orders")
    outcome = succeed(*asked)
    row = ["yes", "Allow Pub on Topic:orders", "this rule decides"]
    assert outcome.rows() == [[name, *row] for name in keepers.names]
    assert outcome.stderr == ""
    keepers.other.answer(RequestCode.AUTH_LIST_ACL, rules("alice", SUB))
    outcome = headrace(*asked, "--from", "10.1.1.1", "--json")
    assert outcome.exit_code == 1
    assert outcome.json()[2] == {
        "daemon": "b:0",
        "allowed": False,
        "rule": None,
        "reason": "no rule speaks of it",
    }
    assert "the daemons differ" in outcome.stderr
    assert "'Read' is no action" in fail(2, *asked[:3], "Read", "Topic:orders")


@pytest.mark.usefixtures("environment")
def test_passwords_come_from_a_file_or_standard_input(keepers: Keepers, tmp_path: Any) -> None:
    create = ("acl", "user", "create", "alice")
    file = tmp_path / "password"
    file.write_text("from a file\n")
    file.chmod(0o600)
    given = {
        "from a file": succeed(*create, "--password-file", str(file)),
        "from input": succeed(*create, stdin=b"from input\n"),
    }
    assert all(outcome == (0, "", "") for outcome in given.values())
    sent = [
        msgspec.json.decode(each.body)["password"]
        for each in keepers.master.asked
        if each.code == RequestCode.AUTH_CREATE_USER
    ]
    assert sent == list(given)
    assert "standard input has no password for user alice" in fail(2, *create)
    assert "has several lines" in fail(2, *create, stdin=b"a\nb\n")
    file.chmod(0o644)
    assert f"chmod 600 {file}" in fail(2, *create, "--password-file", str(file))
    update = ("acl", "user", "update", "alice")
    both = (*update, "--password", "--password-file", str(file))
    assert "give one" in fail(2, *both)
    assert "nothing of user alice to change" in fail(2, *update)
    succeed(*update, "--password", "--disable", "--super", stdin=b"new\n")
    assert keepers.asked(RequestCode.AUTH_UPDATE_USER)[0][1] == (
        b'{"password":"new","userStatus":"disable","userType":"Super","username":"alice"}'
    )


@pytest.mark.usefixtures("environment")
def test_rules_are_added_and_removed(keepers: Keepers) -> None:
    add = ("acl", "rule", "add", "alice", "Topic:orders", "sub", "Pub")
    succeed(*add, "--deny", "--from", "10.0.0.0/8", "--from", "::1", "--default")
    _, body = keepers.asked(RequestCode.AUTH_UPDATE_ACL)[0]
    assert msgspec.json.decode(body)["policies"] == [
        {
            "policyType": "Default",
            "entries": [
                {
                    "actions": ["Pub", "Sub"],
                    "decision": "Deny",
                    "resource": "Topic:orders",
                    "sourceIps": ["10.0.0.0/8", "::1"],
                }
            ],
        }
    ]
    assert "'Read' is no action" in fail(2, *add, "Read")
    assert "name the RESOURCE, or give --all" in fail(2, "acl", "rule", "remove", "alice")
    assert "user alice has no rules" in fail(3, "acl", "rule", "remove", "alice", "--all")
    keepers.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB))
    succeed("acl", "rule", "remove", "alice", "Topic:orders")
    assert keepers.other.count(RequestCode.AUTH_DELETE_ACL) == 1


@pytest.mark.usefixtures("environment")
def test_errors_of_users_have_a_way_out(keepers: Keepers) -> None:
    keepers.answer(RequestCode.AUTH_CREATE_USER, refusal("The user is existed"))
    keepers.nameserver.answer(RequestCode.AUTH_UPDATE_USER, APACHE)
    create = ("acl", "user", "create", "alice")
    assert "`headrace acl user update alice` changes it" in fail(1, *create, stdin=b"x")
    assert "user bob does not exist" in fail(3, "acl", "user", "delete", "bob", "--yes")
    outcome = succeed("acl", "user", "update", "alice", "--enable")
    assert outcome.stderr.startswith(f"headrace: skipped: {keepers.names[-1]} keeps no users")
    keepers.answer(RequestCode.AUTH_LIST_USER, users(ALICE))
    succeed("acl", "user", "delete", "alice", "--yes")


@pytest.mark.usefixtures("environment")
def test_doctor_names_users_that_differ(keepers: Keepers) -> None:
    keepers.answer(RequestCode.AUTH_LIST_USER, users(ALICE))
    keepers.answer(RequestCode.AUTH_LIST_ACL, rules("alice", PUB))
    assert "rights" not in {row["role"] for row in doctor()}
    keepers.other.answer(RequestCode.AUTH_LIST_USER, users(ALICE, ROOT))
    keepers.other.answer(RequestCode.AUTH_LIST_ACL, rules("alice", SUB))
    root, alice = (row for row in doctor() if row["role"] == "rights")
    assert (root["name"], alice["name"], alice["ok"]) == ("root", "alice", False)
    assert root["problem"] == "daemons differ: Super, disabled at b:0 alone: repeat the change"
    assert "Deny Sub on Topic:orders from 10.0.0.0/8 at b:0 alone" in alice["problem"]
    # A user that may not see them.
    keepers.answer(RequestCode.AUTH_LIST_USER, refusal("no"))
    assert "rights" not in {row["role"] for row in doctor()}


@pytest.mark.usefixtures("environment")
def test_doctor_asks_as_its_user(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    def for_users(answer: Reply) -> Any:
        return lambda asked: answer if "AccessKey" in asked.ext else refusal("who are you?")

    keepers.answer(RequestCode.AUTH_SESSION, APACHE)
    for each, code in (
        (keepers.nameserver, RequestCode.GET_BROKER_CLUSTER_INFO),
        (keepers.master, RequestCode.GET_BROKER_RUNTIME_INFO),
    ):
        each.answer(code, for_users(each.answers[code][0]))
    (row,) = doctor()
    assert (row["role"], row["ok"]) == ("nameserver", False)
    assert "who are you?" in row["problem"]
    monkeypatch.setenv("HEADRACE_USER", "alice")
    monkeypatch.setenv("HEADRACE_PASSWORD", "secret")
    assert {(row["role"], row["ok"]) for row in doctor()} == {
        ("nameserver", True),
        ("broker", True),
    }


def doctor() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = headrace("doctor", "--json").json()
    return rows


FILE = """
globalWhiteRemoteAddresses: [10.10.103.*]
accounts:
- accessKey: alice
  secretKey: alicepw
  topicPerms: [orders=PUB]
- accessKey: root
  secretKey: rootpw
  admin: true
- accessKey: nobody
  groupPerms: [g=SUB]
"""


@pytest.mark.usefixtures("environment")
def test_import_makes_users_and_rules(keepers: Keepers, tmp_path: Any) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(FILE)
    planned = succeed("acl", "import", str(file), "--dry-run")
    assert planned.rows() == [
        ["alice", "Normal", "yes", "Allow Pub on Topic:orders", "would be made"],
        ["root", "Super", "yes", "-", "would be made"],
        [
            "nobody",
            "Normal",
            "yes",
            "Allow Sub on Group:g",
            "would get rules: the file has no password",
        ],
    ]
    assert "not carried over: globalWhiteRemoteAddresses 10.10.103.*" in planned.stderr
    assert not keepers.master.asked
    assert "pw" not in planned.stdout + planned.stderr
    keepers.answer(RequestCode.AUTH_UPDATE_ACL, refusal("The subject of User:x is not exist."))
    outcome = headrace("acl", "import", str(file))
    assert outcome.exit_code == 1
    outcomes = [row[-1] for row in outcome.rows()]
    assert outcomes[1] == "made"
    assert outcomes[2].startswith("user nobody does not exist")
    assert keepers.other.count(RequestCode.AUTH_CREATE_USER) == 2
    keepers.answer(RequestCode.AUTH_UPDATE_ACL, Reply())
    keepers.answer(RequestCode.AUTH_CREATE_USER, refusal("The user is existed"))
    assert [row[-1] for row in succeed("acl", "import", str(file)).rows()] == 3 * ["exists"]
