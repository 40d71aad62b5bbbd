"""The settings file of a nameserver: a mistake is named by line, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_nameserver.config import ConfigError, NameServerConfig, load_config


def test_reads_lines_of_keys_and_values(tmp_path: Path) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text(
        "# comment\n\nlistenPort = 9877\nbindAddress=127.0.0.1\nsupportActingMaster=true\n"
        f"kvConfigPath={tmp_path}/x/kv=1.json\n"
    )
    assert load_config(path) == NameServerConfig(
        listen_port=9877,
        bind_address="127.0.0.1",
        support_acting_master=True,
        kv_config_path=f"{tmp_path}/x/kv=1.json",
    )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "listenPort=9876\nlistenport=1",
            r":2: unknown key 'listenport'; did you mean listenPort\?",
        ),
        ("x=1", r":1: unknown key 'x'; known keys: bindAddress, listenPort, "),
        ("\nlistenPort=many", r":2: listenPort = 'many': Expected `int`"),
        ("listenPort=65536", r":1: listenPort = '65536': Expected `int` <= 65535"),
        ("brokerTimeoutMs=0", r":1: brokerTimeoutMs = '0': Expected `int` >= 1"),
        ("supportActingMaster=perhaps", r":1: supportActingMaster = 'perhaps': Expected `bool`"),
        ("listenPort", r":1: expected key=value, found 'listenPort'"),
    ],
)
def test_names_the_line_of_a_mistake(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"namesrv.conf{reason}"):
        load_config(path)


def test_names_a_path_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "namesrv.conf"
    path.write_text(f"\nkvConfigPath={tmp_path}/a/b/kv.json")
    with pytest.raises(
        ConfigError, match=rf"namesrv.conf:2: .*{tmp_path}/a does not exist: create"
    ):
        load_config(path)
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match=rf"namesrv.conf:2: .*{tmp_path}/a is not a directory"):
        load_config(path)
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    assert load_config(path).kv_config_path == f"{tmp_path}/a/b/kv.json"
    assert not (tmp_path / "a/b").exists()
    # Root may write everywhere, so the answer of the system is given here.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="this user may not write to"):
        load_config(path)


def test_names_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.conf: cannot read settings: .*No such file"):
        load_config(tmp_path / "none.conf")
    (tmp_path / "binary.conf").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"binary.conf: cannot read settings: .*utf-8"):
        load_config(tmp_path / "binary.conf")
