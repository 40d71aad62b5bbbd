"""Where the nameserver's address comes from, and how wrong ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.config import NAMESERVER_VARIABLE, Settings, resolve_nameservers
from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that writes the user's config file."""
    monkeypatch.delenv(NAMESERVER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)

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
    settings = Settings("n:1", 'quoted"ä', {'quoted"ä': "a:1;b:2", "dotted.name": "c:3"})
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


@pytest.mark.parametrize(
    ("address", "way_out"),
    [
        ("http://ns:9876/", "write ns:9876, without http://"),
        ("a:1,b:2", "separate addresses by semicolons: 'a:1;b:2'"),
        ("ns:9876:1", r"\[IPV6\]:PORT"),
    ],
)
def test_what_is_no_address_gets_a_way_out(address: str, way_out: str) -> None:
    with pytest.raises(ConfigurationError, match=way_out):
        resolve_nameservers(address)
    assert resolve_nameservers("[::1]:9876") == ("[::1]:9876",)


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ConfigurationError, match="argument"):
        resolve_nameservers("")
