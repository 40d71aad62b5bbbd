"""The context ``dev`` of a secure ``headrace dev``: when it is there, in use, and not replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from headrace.accounts import Account
from headrace.admin.dev_context import check_context, context_of
from headrace.config import Cluster, Settings
from headrace.embedded import SECURITY, Embedded
from headrace.errors import ConfigurationError
from headrace_protocol.tls.settings import ClientTls


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's config file is in it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_NAMESERVER", raising=False)
    return tmp_path


def running(folder: Path, port: int = 1) -> Embedded:
    connect = cast("Any", None)
    return Embedded(f"127.0.0.1:{port}", "127.0.0.1:9", folder, connect, {"root": "secret"})


def test_it_is_in_use_while_the_daemons_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with context_of(running(folder)):
        security = folder / SECURITY
        assert Settings.load().used == Cluster(
            "127.0.0.1:1",
            ClientTls(str(security / "ca.pem")),
            Account("root", password_file=str(security / "root.password")),
        )
        check_context()  # another one may replace it
    assert (Settings.load().contexts, Settings.load().context) == ({}, None)
    assert capsys.readouterr().err == ""


def test_a_context_in_use_stays_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Settings(contexts={"office": Cluster("ns:1")}, context="office").save()
    with context_of(running(folder)):
        assert Settings.load().context == "office"
        assert set(Settings.load().contexts) == {"office", "dev"}
    assert (set(Settings.load().contexts), Settings.load().context) == ({"office"}, "office")
    assert "`headrace context use dev` changes that" in capsys.readouterr().err


def test_the_environment_counts_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", "ns:1")
    with context_of(running(folder)):
        assert "HEADRACE_NAMESERVER is set" in capsys.readouterr().err


def test_the_one_that_began_last_has_it(folder: Path) -> None:
    with context_of(running(folder, 1)):
        with context_of(running(folder, 2)):
            assert Settings.load().used.nameserver == "127.0.0.1:2"
        assert Settings.load().contexts == {}
    assert Settings.load().contexts == {}


@pytest.mark.parametrize("tls", [None, ClientTls(), ClientTls("/etc/ca.pem")])
def test_a_context_of_the_users_own_is_not_replaced(tls: ClientTls | None) -> None:
    Settings(contexts={"dev": Cluster("ns:1", tls)}).save()
    with pytest.raises(ConfigurationError, match="has a context dev of another cluster"):
        check_context()
