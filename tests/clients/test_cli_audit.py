"""``headrace audit``: what it prints of a log, and its exit code."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace_daemon.audit.lines import hash_of
from tests.support.audit import event, files_of, write
from tests.support.cli import fail, headrace, succeed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three events in three files."""
    path = tmp_path / "audit.log"
    write(
        path,
        event("login", user="alice", address="10.0.0.1:5"),
        event("denied", user="alice", resources=("Topic:t", "Group:g"), detail={"count": 3}),
        event("login.failed", user="b\x1b[31mob"),
        bytes_max=1,
    )
    return path


def names(path: Path) -> list[str]:
    """In the order of a shell, which is not that of the log."""
    return sorted(map(str, files_of(path)))


def test_a_log_that_is_right(path: Path) -> None:
    shown = succeed("audit", "verify", *names(path))
    last_hash = hash_of(path.read_bytes()[:-1])
    assert shown.stdout == (
        f"files\t3\nlines\t3\nbegins_after\t{'0' * 64}\nlast_hash\t{last_hash}\n"
    )
    assert not shown.stderr
    found = succeed("audit", "verify", *names(path), "--json", "--expect", last_hash.upper())
    assert found.json()["notes"] == ["0 lines follow the expected one"]
    assert found.json()["problem"] is None


def test_a_log_that_was_changed(path: Path) -> None:
    first = files_of(path)[0]
    first.write_bytes(first.read_bytes().replace(b"alice", b"carol"))
    expected = f"{first}:1: this line was changed"
    assert fail(1, "audit", "verify", *names(path)) == f"headrace: {expected}\n"
    assert headrace("audit", "verify", *names(path), "--json").json()["problem"] == expected


def test_a_log_that_was_cut(path: Path) -> None:
    (last_hash,) = [
        row[1] for row in succeed("audit", "verify", *names(path)).rows() if row[0] == "last_hash"
    ]
    path.unlink()
    succeed("audit", "verify", *names(path))
    assert last_hash in fail(1, "audit", "verify", *names(path), "--expect", last_hash)


def test_a_part_of_a_log_is_said_to_be_one(path: Path) -> None:
    shown = succeed("audit", "verify", str(path))
    assert shown.stderr == f"headrace: {path}:1: line 3 of the log; others came before it\n"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    said = fail(3, "audit", "verify", str(missing))
    assert said == f"headrace: {missing}: No such file or directory\n"


def test_events_are_shown_in_their_order(path: Path) -> None:
    rows = succeed("audit", "show", *names(path)).rows()
    assert [row[2] for row in rows] == ["login", "denied", "login.failed"]
    assert rows[1][3:] == ["alice", "-", "-", "-", "Topic:t, Group:g", "-", "count=3"]
    assert rows[2][3] == "b\\x1b[31mob"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--user", "alice"), ["login", "denied"]),
        (("--event", "denied"), ["denied"]),
        (("--user", "alice", "--event", "login"), ["login"]),
        (("--since", "2026-11-27T12:00:00Z"), ["login", "denied", "login.failed"]),
        (("--since", "2026-11-27T12:00:01Z"), []),
    ],
)
def test_events_are_selected(path: Path, options: tuple[str, ...], shown: list[str]) -> None:
    found = succeed("audit", "show", *names(path), *options, "--json")
    assert [row["event"] for row in found.json_lines()] == shown


def test_events_of_the_last_hours_are_selected(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    moments = [time.gmtime(time.time() - hours * 3600) for hours in (3, 1)]
    write(path, *(event("e", time.strftime("%Y-%m-%dT%H:%M:%S.000Z", each)) for each in moments))
    assert len(succeed("audit", "show", *names(path), "--since", "2h").rows()) == 1


def test_other_lines_are_named(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x\n")
    shown = succeed("audit", "show", str(path))
    assert len(shown.rows()) == 1
    assert shown.stderr == f"headrace: {path}:2: not a line of an audit log\n"
