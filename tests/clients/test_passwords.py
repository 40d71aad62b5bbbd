"""Passwords at a prompt, which a person answers on a terminal."""

from __future__ import annotations

import getpass
import io
import sys
from pathlib import Path

import pytest

from headrace.admin.passwords import read_password
from headrace.errors import ConfigurationError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def answered(monkeypatch: pytest.MonkeyPatch, *typed: str) -> str:
    """The password of a person who types this."""
    words = list(typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(getpass, "getpass", lambda _prompt: words.pop(0))
    return read_password("alice", None)


def test_a_prompt_asks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, "secret", "secret") == "secret"
    with pytest.raises(ConfigurationError, match="the two passwords differ; nothing was changed"):
        answered(monkeypatch, "secret", "other")
    with pytest.raises(ConfigurationError, match="no password was given; nothing was changed"):
        answered(monkeypatch, " ")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "has no password for user alice"),
        (b"\n", "has no password for user alice"),
        (b"a\nb\n", "has several lines"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_a_file_without_one_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "password"
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(ConfigurationError) as error:
        read_password("alice", file)
    assert reason in str(error.value)
