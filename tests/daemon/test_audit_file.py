"""The file of an audit log: rotation, crashes, other writers."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from headrace_daemon.audit.lines import NOTHING
from headrace_daemon.audit.verify import check
from tests.support.audit import (
    checked,
    event,
    files_of,
    files_of_at_most,
    lines_of,
    log_file,
    names_of,
    write,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def holds(path: Path, *names: str) -> None:
    """The log has these events, numbered, and its chain holds."""
    assert names_of(path) == list(names)
    assert [line["number"] for line in lines_of(path)] == list(range(1, len(names) + 1))
    assert checked(path).problem is None


def test_each_line_has_the_hash_of_the_one_before(path: Path) -> None:
    write(path, event("a", user="älice", resources=("Topic:t",)), event("b"))
    first, second = path.read_bytes().splitlines()
    assert first.startswith(b'{"time":"2026-11-27T12:00:00.000Z","daemon":"broker/broker-a",')
    a, b = lines_of(path)
    assert (a["user"], a["resources"], a["outcome"]) == ("älice", ["Topic:t"], None)
    assert a["previous"] == NOTHING.hash
    assert b["previous"] == sha256(first).hexdigest()
    assert checked(path).ends_with == sha256(second).hexdigest()
    holds(path, "a", "b")


def test_only_its_user_reads_it(path: Path) -> None:
    path.touch(0o644)
    write(path, event("a"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_is_not_followed(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(OSError, match=r"audit\.log"):
        write(path, event("a"))
    assert not path.exists()


@pytest.mark.parametrize("content", [b"root:x:0:0\n", b"\x00" * 100, b"[1]"])
def test_another_file_is_not_touched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OSError, match="not an audit log: move it away"):
        write(path, event("a"))
    assert path.read_bytes() == content


def test_a_start_continues_the_chain(path: Path) -> None:
    write(path, event("a"))
    write(path, event("b"))
    write(path, event("c"))
    holds(path, "a", "b", "c")


# -- rotation --------------------------------------------------------------------------------------


def test_it_is_rotated_by_size(path: Path) -> None:
    names = [f"e{number}" for number in range(10)]
    write(path, *map(event, names), bytes_max=1000)
    assert len(files_of(path)) > 3
    assert all(each.stat().st_size <= 1000 for each in files_of(path))
    assert all(stat.S_IMODE(each.stat().st_mode) == 0o600 for each in files_of(path))
    holds(path, *names)


def test_a_line_longer_than_a_file_has_one_of_its_own(path: Path) -> None:
    write(path, event("a"), event("b" * 2000), event("c"), bytes_max=1000)
    assert len(files_of(path)) == 3
    holds(path, "a", "b" * 2000, "c")


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("days", ["27 27 28", "27 28 28", "27 30 28", "28 27 27"])
def test_it_is_rotated_at_each_change_of_the_day(path: Path, days: str, *, restart: bool) -> None:
    """Whether a day ends, or the clock is set forth or back."""
    times = [f"2026-11-{day}T00:00:00.000Z" for day in days.split()]
    events = [event("e", time) for time in times]
    if restart:
        for each in events:
            write(path, each)
    else:
        write(path, *events)
    assert len(files_of(path)) == len(set(days.split()))
    holds(path, "e", "e", "e")


def test_old_files_are_removed(path: Path) -> None:
    names = [f"e{number}" for number in range(10)]
    write(path, *map(event, names), bytes_max=500, files_max=2)
    assert [each.name for each in files_of(path)] == [
        "audit.log.000008",
        "audit.log.000009",
        "audit.log",
    ]
    assert names_of(path) == names[7:]
    found = checked(path)
    assert (found.problem, found.line_count) == (None, 3)
    assert found.notes == [f"{files_of(path)[0]}:1: line 8 of the log; others came before it"]


def test_other_files_beside_it_are_not_counted_as_its_own(path: Path) -> None:
    for name in ("audit.log.1", "audit.log.000001.gz", "audit.log.old"):
        path.with_name(name).touch()
    write(path, event("a"), event("b"), bytes_max=1)
    assert path.with_name("audit.log.000001").exists()


# -- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 5, 100, -1])
@pytest.mark.parametrize("whole", [0, 2])
def test_a_torn_line_is_named_by_the_next(path: Path, whole: int, kept: int) -> None:
    """kill -9 in the middle of a line; -1: all of it but its end."""
    write(path, *map(event, "abc"[: whole + 1]))
    data = path.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    end = start + kept if kept > 0 else len(data) - 1
    path.write_bytes(data[:end])
    write(path, event("d"))
    holds(path, *"abc"[:whole], "log.continued", "d")
    torn = data[start:end]
    assert lines_of(path)[whole]["detail"] == {
        "unfinishedBytes": len(torn),
        "unfinishedHash": sha256(torn).hexdigest(),
    }
    (note,) = checked(path).notes
    rotated = path.with_name("audit.log.000001")
    assert note == f"{rotated}:{whole + 1}: unfinished, as {path}:1 says: the daemon was killed"


def test_crashes_at_each_byte_lose_only_unfinished_lines(path: Path, tmp_path: Path) -> None:
    write(path, event("a"))
    first = path.read_bytes()
    write(path, event("b"))
    for size in range(len(first), path.stat().st_size):
        copy = tmp_path / str(size) / "audit.log"
        copy.parent.mkdir()
        copy.write_bytes(path.read_bytes()[:size])
        write(copy, event("c"))
        assert [name for name in names_of(copy) if name in "abc"] == ["a", "c"], size
        assert checked(copy).problem is None, size


def test_a_line_torn_twice_is_continued(path: Path) -> None:
    write(path, event("a"), event("b"))
    path.write_bytes(path.read_bytes()[:-5])
    write(path)  # rotates
    path.write_bytes(b'{"time":"20')  # killed while it wrote the first line of the new file
    write(path, event("c"))
    holds(path, "a", "log.continued", "c")
    assert len(checked(path).notes) == 2


@pytest.mark.parametrize("created", [False, True])
def test_a_crash_in_a_rotation_loses_nothing(path: Path, created: bool) -> None:
    write(path, event("a"), event("b"))
    path.rename(path.with_name("audit.log.000001"))
    if created:
        path.touch()
    write(path, event("c"))
    holds(path, "a", "b", "c")


def test_the_file_may_go_while_it_is_written(path: Path) -> None:
    file = log_file(path)
    file.open()
    file.append(deque([event("a")]))
    before = checked(path).ends_with
    path.unlink()
    file.append(deque([event("b")]))
    file.close()
    assert names_of(path) == ["b"]
    assert checked(path).begins_after == before
    assert checked(path).problem is None


def test_it_continues_when_a_removed_folder_is_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "audit.log"
    path.parent.mkdir()
    file = log_file(path)
    file.open()
    shutil.rmtree(path.parent)
    events = deque([event("a")])
    with pytest.raises(FileNotFoundError, match="folder"):
        file.append(events)
    assert len(events) == 1
    path.parent.mkdir()
    file.append(events)
    file.close()
    holds(path, "a")


def test_a_failed_write_leaves_no_part_of_a_line(path: Path) -> None:
    file = log_file(path)
    file.open()
    file.append(deque([event("a")]))
    whole = path.read_bytes()
    events = deque([event("b"), event("c")])
    with files_of_at_most(len(whole) + 40), pytest.raises(OSError, match=r"audit\.log"):
        file.append(events)
    assert path.read_bytes() == whole
    file.append(events)
    file.close()
    holds(path, "a", "b", "c")


# -- other writers ---------------------------------------------------------------------------------


def test_two_daemons_do_not_share_a_file(path: Path) -> None:
    first = log_file(path)
    first.open()
    with pytest.raises(OSError, match="another daemon writes this audit log: give each"):
        log_file(path).open()
    first.append(deque([event("a")]))
    first.close()
    write(path, event("b"))
    holds(path, "a", "b")


def test_its_lock_moves_with_a_rotation(path: Path) -> None:
    first = log_file(path, bytes_max=1)
    first.open()
    first.append(deque([event("a"), event("b")]))
    with pytest.raises(OSError, match="another daemon"):
        log_file(path).open()
    first.close()
    assert len(list(path.parent.iterdir())) == 2


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def move_away_and_make(path: Path) -> None:
    move_away(path)
    path.touch(0o644)


def copy_and_cut(path: Path) -> None:
    shutil.copy(path, path.with_name("moved"))
    os.truncate(path, 0)


def make_read_only(path: Path) -> None:
    path.chmod(0o400)


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


CHANGES: dict[str, Callable[[Path], None]] = {
    "moved": move_away,
    "moved, and a new one made": move_away_and_make,
    "copied and cut": copy_and_cut,
    "made read-only": make_read_only,
    "lines added": lambda path: add(path, b"{}\nof another\n"),
    "half a line added": lambda path: add(path, b"{}"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_others_do_to_the_file_costs_no_line(
    path: Path, change: Callable[[Path], None]
) -> None:
    file = log_file(path)
    file.open()
    file.append(deque([event("a")]))
    change(path)
    file.append(deque([event("b")]))
    # What a failed write has left is cut off, and nothing before it.
    with files_of_at_most(path.stat().st_size + 40), pytest.raises(OSError, match=r"audit\.log"):
        file.append(deque([event("c")]))
    file.append(deque([event("c")]))
    file.close()
    files = [each for each in (path.with_name("moved"), *files_of(path)) if each.exists()]
    lines = [line for each in files for line in each.read_bytes().split(b"\n")[:-1]]
    names = [re.search(rb'^\{"time".*"event":"([a-c])"', line) for line in lines]
    assert [name[1] for name in names if name] == [b"a", b"b", b"c"]
    found = check(files)
    if b"of another" in lines:
        assert found.problem == f"{path}:2: not a line of an audit log: it was changed or added"
    else:
        assert (found.problem, found.line_count) == (None, len(lines))
