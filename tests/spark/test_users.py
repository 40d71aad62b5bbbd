"""Spark as a user: options, and where passwords are not."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from headrace.accounts import Account
from headrace.errors import ConfigurationError
from headrace.spark.errors import OptionError
from headrace.spark.options import read_options
from headrace.spark.write.sink import write_options

TOPIC = {"topic": "a"}
ALICE = TOPIC | {"user": "alice"}


def test_options_name_the_user_and_a_file(tmp_path: Path) -> None:
    assert read_options(TOPIC).dial.account is None
    file = str(tmp_path / "alice.pw")
    named = Account("alice", password_file=file)
    assert read_options(ALICE | {"passwordFile": file}).dial.account == named
    assert write_options(ALICE | {"passwordFile": file}).dial.account == named
    with pytest.raises(OptionError, match="takes effect only with option user"):
        read_options(TOPIC | {"passwordFile": file})


def test_the_user_of_the_environment_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_USER", "bob")
    assert read_options(TOPIC).dial.account == Account("bob")
    assert read_options(ALICE).dial.account == Account("alice")


def test_no_password_is_in_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "headrace.toml"
    file.touch(mode=0o600)
    file.write_text('[auth]\nuser = "carol"\npassword = "hidden"')
    monkeypatch.setenv("HEADRACE_PASSWORD", "hidden")
    for options in (read_options(TOPIC), write_options(TOPIC)):
        assert options.dial.account == Account("carol")
        assert b"hidden" not in pickle.dumps(options.dial)
        assert "hidden" not in repr(options)
    # Each process looks for it.
    assert read_options(TOPIC).dial.account.credentials() == ("carol", "hidden")  # type: ignore[union-attr]
    monkeypatch.delenv("HEADRACE_PASSWORD")
    with pytest.raises(ConfigurationError, match="user 'carol' has no password"):
        read_options(TOPIC).dial.account.credentials()  # type: ignore[union-attr]


def test_an_option_with_the_password_is_rejected_unseen() -> None:
    with pytest.raises(OptionError, match="passwordFile") as caught:
        read_options(ALICE | {"password": "hidden"})
    assert "hidden" not in str(caught.value)
