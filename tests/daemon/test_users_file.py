"""The users' file: whole after any crash, private, and read by its own daemon only."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import msgspec
import pytest

from headrace_daemon.access.accounts import Accounts, Edit
from headrace_daemon.access.cipher import Cipher
from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.opening import check_users
from headrace_daemon.access.settings import AccessConfig
from headrace_daemon.access.users_file import Account, UsersFile
from headrace_protocol.codes import RequestCode as Code
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.auth_requests import UserHeader
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.rights.users import User, UserKind, UserStatus, Verifier
from tests.support.access import CHECKED, OWNER, ROOT, UsersUnderTest, entry, opened
from tests.support.seeds import seeds

VERIFIER = Verifier(b"salt", 4096, b"s" * 32, b"k" * 32)
KEY = b"0123456789abcdef0123456789abcdef"


def account(name: str, secret: str | None = "secret") -> Account:
    return Account(User(name, UserKind.NORMAL, UserStatus.ENABLE, VERIFIER, secret))


def test_a_restart_keeps_users_rules_and_status(tmp_path: Path) -> None:
    daemon = UsersUnderTest(tmp_path)
    daemon.make("alice", user_status="disable", signatures=False)
    daemon.make("bob", password='bob\'s "пароль" \\ ')
    rules = entry("Topic:a*", "Pub", "Sub", addresses=["10.0.0.0/8", "::1"]), entry("*", "Get")
    assert daemon.rule("bob", *rules)[0] == 0
    daemon.make("carol", password=None, no_password=True)
    assert daemon.rule("bob", entry("Group:g", "Sub", decision="Deny"), kind="Default")[0] == 0
    users = daemon.users
    again = opened(tmp_path).users
    assert again.users == users.users
    assert again.users["carol"].verifier is None
    assert again.rules("bob").custom == users.rules("bob").custom
    assert again.rules("bob").default == users.rules("bob").default


@pytest.mark.parametrize("time_s", [0, 4_000_000_000])
def test_the_clock_does_not_matter(tmp_path: Path, time_s: int) -> None:
    path = UsersUnderTest(tmp_path).path
    os.utime(path, (time_s, time_s))
    daemon = UsersUnderTest(tmp_path)
    daemon.make("alice")
    daemon.make("bob")
    assert list(opened(tmp_path).users.users) == ["root", "alice", "bob"]


def test_the_file_is_private_and_json(tmp_path: Path) -> None:
    daemon = UsersUnderTest(tmp_path)
    daemon.make("alice")
    assert daemon.path.stat().st_mode & 0o777 == 0o600
    found = msgspec.json.decode(daemon.path.read_bytes())
    assert [user["name"] for user in found["users"]] == ["root", "alice"]
    assert found["owner"] == OWNER


def test_an_empty_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    UsersFile(path, OWNER).save({})
    assert UsersFile(path, OWNER).load() == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_or_changed_file_is_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    daemon = UsersUnderTest(tmp_path)
    daemon.make("alice")
    whole = daemon.path.read_bytes()
    damaged = [whole[: rng.randrange(len(whole))] for _ in range(20)]
    for _ in range(50):
        place = rng.randrange(len(whole))
        changed = bytes([whole[place] ^ (1 << rng.randrange(8))])
        damaged.append(whole[:place] + changed + whole[place + 1 :])
    damaged += [b"", whole + b"\n", whole.replace(b'"Normal"', b'"Super"'), whole + whole]
    for data in damaged:
        daemon.path.write_bytes(data)
        with pytest.raises(AccessError, match=f"{daemon.path}"):
            opened(tmp_path)
    daemon.path.write_bytes(whole)
    opened(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.chmod(0o644), "other users may read or change it .*chmod 600"),
        (
            lambda path: path.write_text(path.read_text().replace("alice", "malice")),
            "changed by hand, or damaged: does not match its seal; put a good copy in its place",
        ),
        (
            lambda path: path.write_text(path.read_text().replace('"format":1', '"format":2')),
            "has format 2, and this version reads 1: start the version that wrote it",
        ),
        (lambda path: path.write_text(path.read_text()[:-9]), "does not match its seal"),
        (lambda path: path.write_text("{}"), "changed by hand, or damaged"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: object, reason: str) -> None:
    daemon = UsersUnderTest(tmp_path)
    daemon.make("alice")
    change(daemon.path)  # type: ignore[operator]
    with pytest.raises(AccessError, match=f"{daemon.path}: .*{reason}"):
        opened(tmp_path)
    with pytest.raises(AccessError, match=reason):
        check_users(AccessConfig(CHECKED, ROOT), daemon.path, OWNER)


def test_the_users_of_another_daemon_are_refused(tmp_path: Path) -> None:
    UsersUnderTest(tmp_path)
    with pytest.raises(AccessError, match=f"has the users of {OWNER}, and this is nameserver"):
        opened(tmp_path, owner="nameserver")


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "users.json").mkdir(mode=0o700)
    with pytest.raises(AccessError, match="cannot read the users: Is a directory"):
        opened(tmp_path)


# -- first start -----------------------------------------------------------------------------------


def test_the_users_of_the_settings_are_made_once(tmp_path: Path) -> None:
    inner = Credentials("inner", "innersecret")
    first = opened(tmp_path, AccessConfig(CHECKED, ROOT, inner)).users.users
    assert [(user.name, user.is_super, user.secret) for user in first.values()] == [
        ("root", True, "rootsecret"),
        ("inner", True, "innersecret"),
    ]
    changed = AccessConfig(CHECKED, Credentials("root", "other"), Credentials("inner", "other"))
    again = opened(tmp_path, changed).users.users
    assert again == first


def test_another_name_in_the_settings_makes_another_super_user(tmp_path: Path) -> None:
    UsersUnderTest(tmp_path).make("alice")
    forgotten = AccessConfig(CHECKED, Credentials("rescue", "rescue-password"))
    users = opened(tmp_path, forgotten).users.users
    assert {name: user.is_super for name, user in users.items()} == {
        "root": True,
        "alice": False,
        "rescue": True,
    }


@pytest.mark.parametrize("has_disabled", [False, True])
def test_no_super_user_is_invented(tmp_path: Path, has_disabled: bool) -> None:
    if has_disabled:
        users = {"root": User("root", UserKind.SUPER, UserStatus.DISABLE, VERIFIER)}
        path = tmp_path / "users.json"
        UsersFile(path, OWNER).save({name: Account(user) for name, user in users.items()})
    config = AccessConfig(CHECKED)
    for start in (
        lambda: opened(tmp_path, config),
        lambda: check_users(config, tmp_path / "users.json", OWNER),
    ):
        with pytest.raises(AccessError) as raised:
            start()
        assert "has no enabled Super user" in str(raised.value)
        assert '{"username":"root","password":"..."}' in str(raised.value)
        assert "initAuthenticationUserFile" in str(raised.value)


# -- encryption ------------------------------------------------------------------------------------


def config_of(key: bytes | None) -> AccessConfig:
    return AccessConfig(CHECKED, ROOT, cipher=Cipher(key, "authKeyFile=k") if key else None)


def test_passwords_are_encrypted_under_a_key(tmp_path: Path) -> None:
    daemon = UsersUnderTest(tmp_path, config_of(KEY))
    daemon.make("alice")
    assert b"rootsecret" not in daemon.path.read_bytes()
    assert b"alice-password" not in daemon.path.read_bytes()
    assert opened(tmp_path, config_of(KEY)).users.users["alice"].secret == "alice-password"


def test_a_key_that_is_given_later_encrypts_at_the_next_start(tmp_path: Path) -> None:
    daemon = UsersUnderTest(tmp_path)
    assert b"rootsecret" in daemon.path.read_bytes()
    opened(tmp_path, config_of(KEY))
    assert b"rootsecret" not in daemon.path.read_bytes()
    assert opened(tmp_path, config_of(KEY)).users.users["root"].secret == "rootsecret"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (None, "its passwords are encrypted: set authKeyFile"),
        (KEY[::-1], "another key than that of authKeyFile"),
    ],
)
def test_encrypted_passwords_need_their_key(tmp_path: Path, key: bytes | None, reason: str) -> None:
    UsersUnderTest(tmp_path, config_of(KEY))
    with pytest.raises(AccessError, match=reason):
        opened(tmp_path, config_of(key))


def test_a_password_is_encrypted_for_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    UsersFile(path, OWNER, Cipher(KEY, "")).save({"a": account("a"), "b": account("b", "other")})
    lines = path.read_bytes().split(b"\n")
    words = [msgspec.json.decode(line.rstrip(b","))["encrypted"].encode() for line in lines[1:3]]
    assert words[0] != words[1]
    cipher = Cipher(KEY, "")
    assert cipher.decrypt("a", cipher.encrypt("a", "x")) == "x"
    with pytest.raises(Exception, match="b"):
        cipher.decrypt("b", cipher.encrypt("a", "x"))


def test_a_short_key_is_refused() -> None:
    with pytest.raises(AccessError, match="authKeyFile=k: a key has at least 32 random characters"):
        Cipher(b"short\n" * 5, "authKeyFile=k")


# -- saves -----------------------------------------------------------------------------------------


def test_a_change_that_can_not_be_saved_is_refused(tmp_path: Path) -> None:
    daemon = UsersUnderTest(tmp_path)
    before = daemon.path.read_bytes()
    in_the_way = tmp_path / "users.json.tmp"
    in_the_way.mkdir()
    code, remark, _ = daemon.change_user(Code.AUTH_CREATE_USER, "alice", password="x")
    assert code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert remark.startswith(f"the change is not in force, since {daemon.path} can't be written: ")
    assert daemon.ask(Code.AUTH_GET_USER, UserHeader(username="alice"))[2] == b""
    assert daemon.path.read_bytes() == before
    in_the_way.rmdir()
    daemon.make("alice")
    assert "alice" in opened(tmp_path).users.users


def test_a_file_that_another_program_changes_is_not_overwritten(tmp_path: Path) -> None:
    first, second = UsersUnderTest(tmp_path), UsersUnderTest(tmp_path)
    first.make("alice")
    code, remark, _ = second.change_user(Code.AUTH_CREATE_USER, "bob", password="x")
    assert code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert remark.endswith("another program has changed it: restart this daemon")
    first.make("carol")
    assert list(opened(tmp_path).users.users) == ["root", "alice", "carol"]


def made(name: str, _: object) -> Edit:
    if name == "refused":
        raise RequestError(16, "no")
    return Edit(name, account(name))


def test_changes_that_wait_are_saved_together(tmp_path: Path) -> None:
    saves: list[int] = []

    class Counted(UsersFile):
        def save(self, accounts: object) -> None:
            saves.append(len(accounts))  # type: ignore[arg-type]
            super().save(accounts)  # type: ignore[arg-type]

    accounts = Accounts(Counted(tmp_path / "users.json", OWNER), {})
    names = [f"user{number}" for number in range(20)]
    changes = [accounts.change(partial(made, name)) for name in names]
    waits = [change.send(None) for change in changes]
    waits[0].fetch()
    assert saves == [20]
    for wait in waits[1:]:
        wait.fetch()
    assert not accounts.users.users
    for change in changes:
        with pytest.raises(StopIteration):
            change.send(None)
    assert saves == [20]
    assert list(accounts.users.users) == names


def test_a_refused_change_leaves_those_beside_it(tmp_path: Path) -> None:
    accounts = Accounts(UsersFile(tmp_path / "users.json", OWNER), {})
    names = ["a", "refused", "b"]
    changes = [accounts.change(partial(made, name)) for name in names]
    for change in changes:
        change.send(None).fetch()
    for change, name in zip(changes, names, strict=True):
        with pytest.raises(RequestError if name == "refused" else StopIteration):
            change.send(None)
    assert list(accounts.users.users) == ["a", "b"]
    assert list(UsersFile(tmp_path / "users.json", OWNER).load()) == ["a", "b"]


def test_only_changed_users_are_encoded(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    cipher = Cipher(KEY, "")
    UsersFile(path, OWNER, cipher).save({name: account(name) for name in "abc"})
    before = path.read_bytes().split(b"\n")
    file = UsersFile(path, OWNER, cipher)
    loaded = file.load()
    loaded["b"] = account("b")
    file.save(loaded)
    # Encryption is at random, so a line that is encoded again is another one.
    after = path.read_bytes().split(b"\n")
    assert [one == other for one, other in zip(before, after, strict=True)][:4] == [
        True,
        True,
        False,
        True,
    ]
    again = UsersFile(path, OWNER, cipher).load()
    assert [each.user for each in again.values()] == [each.user for each in loaded.values()]


@pytest.mark.parametrize("seed", seeds(4))
def test_what_is_in_force_is_what_a_restart_reads(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    daemon = UsersUnderTest(tmp_path)
    for _ in range(60):
        name = rng.choice("abc")
        step = rng.randrange(4)
        if step == 0:
            daemon.change_user(Code.AUTH_CREATE_USER, name, password=rng.choice(["", "x", "y"]))
        elif step == 1:
            daemon.ask(Code.AUTH_DELETE_USER, UserHeader(username=rng.choice([name, "root"])))
        elif step == 2:
            daemon.rule(name, entry(f"Topic:{rng.choice('xy')}", rng.choice(["Pub", "None"])))
        else:
            kind = rng.choice(["Super", "Normal", "Odd"])
            daemon.change_user(Code.AUTH_UPDATE_USER, rng.choice([name, "root"]), user_type=kind)
    assert not daemon.unexpected
    users, saved = daemon.users, UsersFile(daemon.path, OWNER).load()
    assert users.users == {name: each.user for name, each in saved.items()}
    for name, each in saved.items():
        assert users.rules(name).custom == each.rules.custom
