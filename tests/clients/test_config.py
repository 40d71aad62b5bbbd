"""The sources of the nameserver's address, and the refusal of wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trio

import headrace
from headrace.accounts import PASSWORD_FILE_VARIABLE, PASSWORD_VARIABLE, USER_VARIABLE, Account
from headrace.config import (
    NAMESERVER_VARIABLE,
    Cluster,
    ConnectOptions,
    Settings,
    resolve_account,
    resolve_nameservers,
    resolve_tls,
)
from headrace.errors import ConfigurationError, NameserverUnavailable
from headrace_protocol.rights.credentials import Token
from headrace_protocol.tls.settings import ClientTls


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that writes the user's config file."""
    monkeypatch.delenv(NAMESERVER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for variable in (USER_VARIABLE, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def write(text: str) -> Path:
        path = tmp_path / ".config" / "headrace.toml"
        path.parent.mkdir()
        path.write_text(text)
        return path

    return write


def test_this_machine_without_any_setting() -> None:
    assert resolve_nameservers() == ("127.0.0.1:9876",)


def test_the_file_the_environment_and_the_argument_in_rising_order(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config('nameserver = "file:1"')
    assert resolve_nameservers() == ("file:1",)
    monkeypatch.setenv(NAMESERVER_VARIABLE, "environment:2; other:3")
    assert resolve_nameservers() == ("environment:2", "other:3")
    assert resolve_nameservers("argument:4") == ("argument:4",)
    assert resolve_nameservers(["a:5", "b:6"]) == ("a:5", "b:6")


def test_a_list_in_the_file(config: Callable[..., Any]) -> None:
    config('nameserver = ["a:1", "b:2"]')
    assert resolve_nameservers() == ("a:1", "b:2")


def test_the_context_in_use(config: Callable[..., Any]) -> None:
    contexts = '\n[contexts]\na = "a:1"\nb = ["b:1", "b:2"]'
    path = config('nameserver = "file:1"' + contexts)
    assert resolve_nameservers() == ("file:1",)
    path.write_text('nameserver = "file:1"\ncontext = "b"' + contexts)
    assert resolve_nameservers() == ("b:1", "b:2")


def test_the_file_is_where_the_environment_says(
    config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config('nameserver = "home:1"')
    (tmp_path / "headrace.toml").write_text('nameserver = "xdg:1"')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert resolve_nameservers() == ("xdg:1",)
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    assert resolve_nameservers() == ("home:1",)


def test_settings_are_saved_as_they_are_read(tmp_path: Path) -> None:
    full = ClientTls(*(f"a {name}" for name in ClientTls._fields))
    contexts = {
        'quoted"ä': Cluster("a:1;b:2"),
        "dotted.name": Cluster("c:3", ClientTls()),
        "full": Cluster("d:4", full),
    }
    settings = Settings(Cluster("n:1", full), 'quoted"ä', contexts)
    settings.save()
    assert Settings.load() == settings
    assert [path.name for path in (tmp_path / ".config").iterdir()] == ["headrace.toml"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('context = "a"', "no context 'a'"),
        ("context = []", "no context"),
        ("contexts = 1", "contexts is not a table"),
        ('[contexts]\na = "a"', "context a.*HOST:PORT"),
        ("nameserver = 9 9", "line 1"),
        ('name_server = "a:1"', "unknown key 'name_server'"),
        ('nameserver = "a"', "HOST:PORT"),
        ("nameserver = []", "names no nameserver"),
        ("nameserver = 9876", "string nor a list"),
    ],
)
def test_a_wrong_file_is_named(config: Callable[..., Any], text: str, reason: str) -> None:
    path = config(text)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        resolve_nameservers()
    assert str(path) in str(caught.value)


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMESERVER_VARIABLE, "host")
    with pytest.raises(ConfigurationError, match=NAMESERVER_VARIABLE):
        resolve_nameservers()


async def test_a_brokers_address_is_told_from_a_nameservers() -> None:
    async with headrace.embedded(memory=True) as mq:
        wrong: Any = {"nameserver": mq.broker, "connect": mq.connect}
        async with headrace.Producer(**wrong) as producer, headrace.Admin(**wrong) as admin:
            with pytest.raises(NameserverUnavailable, match="perhaps a broker") as caught:
                await producer.send(headrace.Message("T", b"x"))
            assert not caught.value.retryable
            with pytest.raises(NameserverUnavailable, match="perhaps a broker"):
                await admin.cluster()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"<!DOCTYPE HTML>\n"])
async def test_an_http_server_is_no_nameserver(answer: bytes) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(answer)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with headrace.Producer(nameserver=f"127.0.0.1:{port}") as producer:
            with pytest.raises(NameserverUnavailable, match="speaks HTTP, not RocketMQ"):
                await producer.send(headrace.Message("T", b"x"))
        nursery.cancel_scope.cancel()


# -- TLS -------------------------------------------------------------------------------------------

FILES = """
nameserver = "file:1"
[tls]
ca_file = "file.pem"
[contexts.secure]
nameserver = "secure:1"
[contexts.secure.tls]
ca_file = "secure.pem"
server_name = "broker"
[contexts.plain]
nameserver = "plain:1"
"""


def test_tls_of_the_file_belongs_to_its_addresses(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(FILES)
    assert resolve_tls({}) == ClientTls("file.pem")
    path.write_text('context = "secure"' + FILES)
    assert resolve_tls({}) == ClientTls("secure.pem", server_name="broker")
    assert resolve_tls({}, "argument:1") == ClientTls("file.pem")
    monkeypatch.setenv(NAMESERVER_VARIABLE, "environment:1")
    assert resolve_tls({}) == ClientTls("file.pem")
    monkeypatch.delenv(NAMESERVER_VARIABLE)
    path.write_text('context = "plain"' + FILES)
    assert resolve_tls({}) is None


def test_tls_of_the_environment_and_of_arguments_comes_first(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config(FILES)
    monkeypatch.setenv("HEADRACE_TLS", "1")
    assert resolve_tls({}) == ClientTls()
    monkeypatch.setenv("HEADRACE_TLS_CA", "environment.pem")
    assert resolve_tls({}) == ClientTls("environment.pem")
    assert resolve_tls({"tls": True}) == ClientTls()
    assert resolve_tls({"ca_file": Path("argument.pem")}) == ClientTls("argument.pem")
    assert resolve_tls({"tls": False}) is None
    monkeypatch.setenv("HEADRACE_TLS", "0")
    assert resolve_tls({}) is None


@pytest.mark.parametrize(
    ("options", "variable", "file", "reason"),
    [
        ({"tls": False, "ca_file": "x"}, "", "", "tls=False, but ca_file is given"),
        ({}, "maybe", "", "HEADRACE_TLS=maybe: expected 1 or 0"),
        ({}, "", "tls = 3", "tls is neither true nor a table of ca_file"),
        ({}, "", "[tls]\nca = 'x'", "tls: unknown key 'ca'; known keys: ca_file"),
        ({}, "", "[tls]\nca_file = 1", "tls: ca_file = 1 is no text"),
        ({}, "", "[contexts.a]\naddress = 'x'", "context a: unknown key 'address'"),
    ],
)
def test_wrong_settings_of_tls_are_named(
    config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: ConnectOptions,
    variable: str,
    file: str,
    reason: str,
) -> None:
    config(file)
    monkeypatch.setenv("HEADRACE_TLS", variable)
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        resolve_tls(options)


# -- users -----------------------------------------------------------------------------------------

USERS = """
nameserver = "file:1"
[auth]
user = "filed"
password_file = "filed.pw"
[contexts.plain]
nameserver = "plain:1"
[contexts.own]
nameserver = "own:1"
[contexts.own.auth]
user = "own"
"""


def private(path: Path, text: str) -> str:
    """A file of mode 0600."""
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_the_user_of_the_file_belongs_to_its_addresses(config: Callable[..., Any]) -> None:
    path = config(USERS)
    filed = Account("filed", password_file="filed.pw")
    assert resolve_account({}) == filed
    path.write_text('context = "own"' + USERS)
    assert resolve_account({}) == Account("own")
    assert resolve_account({}, "argument:1") == filed
    path.write_text('context = "plain"' + USERS)
    assert resolve_account({}) is None


def test_the_user_of_the_environment_and_of_arguments_comes_first(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config(USERS)
    monkeypatch.setenv(USER_VARIABLE, "environment")
    assert resolve_account({}) == Account("environment")
    assert resolve_account({"user": "argument", "password": "pw"}) == Account("argument", "pw")
    assert resolve_account({"user": ""}) is None


def test_a_password_is_found_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="user 'a' has no password: set HEADRACE_PASS"):
        Account("a").credentials()
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, private(tmp_path / "a.pw", "of the file\n"))
    assert Account("a").credentials() == ("a", "of the file")
    monkeypatch.setenv(PASSWORD_VARIABLE, "of the environment")
    assert Account("a").credentials() == ("a", "of the environment")
    assert Account("a", password_file=str(tmp_path / "a.pw")).credentials() == ("a", "of the file")
    assert Account("a", "of the argument").credentials() == ("a", "of the argument")


def test_a_password_file_for_others_to_read_is_rejected(tmp_path: Path) -> None:
    path = Path(private(tmp_path / "a.pw", "hidden"))
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600") as caught:
        Account("a", password_file=str(path)).credentials()
    assert "hidden" not in str(caught.value)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        Account("a", password_file=str(path)).credentials()


def test_a_password_in_the_config_file_needs_a_private_file(config: Callable[..., Any]) -> None:
    path = config('[auth]\nuser = "a"\npassword = "hidden"')
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600") as caught:
        resolve_account({})
    assert "hidden" not in str(caught.value)
    path.chmod(0o600)
    account = resolve_account({})
    assert account == Account("a", "hidden")
    assert "hidden" not in repr(account)


@pytest.mark.parametrize(
    ("options", "file", "reason"),
    [
        ({"password": "pw"}, "", "give a user with the password"),
        ({"user": "a", "token": "t"}, "", "give a user with the password"),
        ({"token": "t", "token_file": "t"}, "", "give a user with the password"),
        ({"token": "t", "password": "pw"}, "", "give a user with the password"),
        ({}, "[auth]\nuser = 'a'\ntoken_file = 'x'", "auth is no table with either"),
        ({}, "auth = 3", "auth is no table with either a user or a token_file"),
        ({}, "[auth]\npassword_file = 'x'", "auth is no table with either a user or a token_file"),
        ({}, "[auth]\nuser = 'a'\nsecret = 'x'", "auth: unknown key 'secret'"),
        ({}, "[auth]\nuser = 1", "auth: user = 1 is no text"),
    ],
)
def test_wrong_settings_of_users_are_named(
    config: Callable[..., Any], options: ConnectOptions, file: str, reason: str
) -> None:
    config(file)
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        resolve_account(options)


def test_a_token_is_that_of_the_argument_the_environment_or_the_file(
    config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config('[auth]\ntoken_file = "filed"')
    assert resolve_account({}) == Account(token_file="filed")
    Settings.load().save()
    assert Settings.load().used.account == Account(token_file="filed")
    assert Settings.load().used.arguments()["token_file"] == "filed"
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", "environment")
    assert resolve_account({}) == Account(token_file="environment")
    assert resolve_account({"token_file": tmp_path}) == Account(token_file=str(tmp_path))
    assert resolve_account({"token": "text"}) == Account(token="text")
    assert resolve_account({"user": "a"}) == Account("a")
    assert resolve_account({"user": ""}) is None
    monkeypatch.setenv("HEADRACE_USER", "a")
    with pytest.raises(ConfigurationError, match="unset one"):
        resolve_account({})


def test_a_token_is_found_anew_and_not_shown(tmp_path: Path) -> None:
    path = Path(private(tmp_path / "token", "hidden\n"))
    account = Account(token_file=str(path))
    assert account.find() == Token("hidden")
    path.write_text("next")
    assert account.find() == Token("next")
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"token file .* chmod 600"):
        account.find()
    tokens = iter(["one", "two"])
    asked = Account(token=lambda: next(tokens))
    assert [asked.find(), asked.find()] == [Token("one"), Token("two")]
    with pytest.raises(ConfigurationError, match="the function token raised StopIteration"):
        asked.find()
    with pytest.raises(ConfigurationError, match="a int, where a text belongs"):
        Account(token=cast("Any", 3)).find()
    assert "hidden" not in repr(Account(token="hidden"))
    assert str(path) in repr(account)


def test_the_user_survives_a_save_of_the_file(config: Callable[..., Any]) -> None:
    config(USERS)
    Settings.load().save()
    assert resolve_account({}) == Account("filed", password_file="filed.pw")
    assert Settings.load().contexts["own"].account == Account("own")


def test_arguments_of_a_cluster_have_its_user_or_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_VARIABLE, "environment")
    monkeypatch.setenv(PASSWORD_VARIABLE, "pw")
    assert Cluster("a:1").arguments()["user"] == ""
    named = Cluster("a:1", account=Account("own")).arguments()
    assert (named["user"], named["password"]) == ("own", "pw")
