"""Spark as a user: options, and where passwords are not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headrace.accounts import Account
from headrace.blocking import Admin
from headrace.errors import ConfigurationError
from headrace.rights import Rule
from headrace.spark.errors import OptionError
from headrace.spark.options import read_options
from headrace.spark.write.sink import write_options
from tests.support.secured import Secured

TOPIC = {"topic": "a"}
ROOT: Any = {"user": "root", "password": "hidden-root"}
ALICE = TOPIC | {"user": "alice"}


@pytest.mark.slow
def test_rows_are_written_and_read_as_a_user(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "alice.pw"
    file.touch(mode=0o600)
    file.write_text("hidden-alice")
    (tmp_path / "cluster").mkdir()
    with Secured(tmp_path / "cluster", users=True) as cluster:
        with Admin(**cluster.at, **ROOT) as admin:
            admin.create_topic("Rows")
            admin.create_topic("Others")
            admin.create_user("alice", "hidden-alice")
            admin.set_rules("alice", [Rule("Topic:Rows", ("Pub", "Sub"))])
        at = {
            "nameserver": cluster.nameserver,
            "caFile": cluster.ca_file,
            "user": "alice",
            "passwordFile": str(file),
        }
        rows = spark.createDataFrame([(bytes([number]),) for number in range(20)], "value binary")
        rows.write.format("headrace").options(**at, topic="Rows").mode("append").save()
        read = spark.read.format("headrace").options(**at, topic="Rows").load()
        assert read.count() == 20
        with pytest.raises(Exception, match="no permission to access Topic:Others") as caught:
            rows.write.format("headrace").options(**at, topic="Others").mode("append").save()
        assert "hidden" not in str(caught.value)
        plan = read._jdf.queryExecution().toString()
        assert "hidden" not in plan


def test_options_name_the_user_and_a_file(tmp_path: Path) -> None:
    assert read_options(TOPIC).dial.account is None
    file = str(tmp_path / "alice.pw")
    named = Account("alice", password_file=file)
    assert read_options(ALICE | {"passwordFile": file}).dial.account == named
    assert write_options(ALICE | {"passwordFile": file}).dial.account == named
    with pytest.raises(OptionError, match="takes effect only with option user"):
        read_options(TOPIC | {"passwordFile": file})


def test_a_token_is_in_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "token")
    assert read_options(TOPIC | {"tokenFile": file}).dial.account == Account(token_file=file)
    with pytest.raises(OptionError, match="give a user with the password"):
        write_options(ALICE | {"tokenFile": file})
    with pytest.raises(OptionError, match="or tokenFile") as caught:
        read_options(TOPIC | {"token": "hidden"})
    assert "hidden" not in str(caught.value)


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
