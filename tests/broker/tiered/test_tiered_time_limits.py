"""Operations of a location that hang: abandoned, bounded, and fenced until they return."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from headrace_broker.tiered.driver.memory import MemoryDriver
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.tier import operations
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.operations import Operation
from headrace_protocol.tier.time_limits import TimeLimits
from tests.support.cli import fail
from tests.support.hanging import Hanging, Patience, When
from tests.support.rescued_tiers import Layout, fill, folder, write_config

PATH = "a/b/segment"


def reason_of(result: object) -> str:
    assert isinstance(result, Failure), result
    assert result.kind is FailureKind.UNREACHABLE
    return result.reason


def test_an_operation_that_does_not_return_is_unreachable() -> None:
    location, patience = Hanging(MemoryDriver()), Patience()
    driver = patience.limited(location)
    assert isinstance(driver.put(PATH, b"12345"), str)
    location.hang("read")
    found = patience.abandon(location, lambda: driver.read(PATH, [(0, 5)]))
    assert reason_of(found) == "no answer to read in 1000 s"
    assert patience.limits.abandoned_count == 1
    location.release_all()
    patience.settle()
    assert driver.read(PATH, [(0, 5)]) == [b"12345"]


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("name", ["append", "cut", "delete"])
def test_nothing_else_changes_a_path_until_a_late_write_has_returned(name: str, when: When) -> None:
    location, patience = Hanging(MemoryDriver()), Patience()
    driver = patience.limited(location)
    assert driver.append(PATH, 0, b"12345") is None
    works = {
        "append": lambda: driver.append(PATH, 5, b"6"),
        "cut": lambda: driver.cut(PATH, 3),
        "delete": lambda: driver.delete(["x", PATH]),
    }
    location.hang(name, when=when)
    patience.abandon(location, works[name])
    location.hang()
    refused = [*(work() for work in works.values()), driver.entries("a/b"), driver.entries("a")]
    for result in refused:
        assert "has not returned for 1000 s, and may still take effect" in reason_of(result)
    # Others go on.
    assert driver.append(f"{PATH}2", 0, b"1") is None
    assert driver.entries("a/bb") == []
    assert isinstance(driver.size(PATH), int | Failure)
    location.release_all()
    patience.settle()
    left = {"append": b"123456", "cut": b"123", "delete": None}[name]
    found = driver.size(PATH)
    assert found == len(left) if left is not None else isinstance(found, Failure)
    assert not isinstance(driver.entries("a/b"), Failure)


def test_so_many_threads_hang_and_no_more() -> None:
    location, patience = Hanging(MemoryDriver()), Patience()
    driver = patience.limited(location)
    driver.put(PATH, b"12345")
    location.hang("read", "size")
    for _ in range(8):
        patience.abandon(location, lambda: driver.read(PATH, [(0, 5)]))
    assert patience.limits.abandoned_count == len(location.held) == 8
    # At once, also where nothing would hang.
    assert "8 operations have not returned; the read of a/b/segment" in reason_of(driver.size(PATH))
    assert "8 operations" in reason_of(driver.put("c", b"x"))
    location.hang()
    location.release()
    while patience.limits.abandoned_count == 8:
        Event().wait(0.001)
    assert driver.size(PATH) == 5
    location.release_all()


def test_a_stop_ends_what_waits_and_what_comes_later() -> None:
    location, limits = Hanging(MemoryDriver()), TimeLimits()
    driver = Patience(limits).limited(location)
    driver.put(PATH, b"12345")
    location.hang("read")
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(driver.read, PATH, [(0, 5)])
        assert location.is_hung()
        limits.end_by(0.0)
        assert "no answer to read in 0 s" in reason_of(waits.result(30))
    assert "no answer to read" in reason_of(driver.read(PATH, [(0, 5)]))
    limits.end_by(math.inf)
    location.release_all()


def test_unexpected_errors_are_those_of_the_caller() -> None:
    class Broken(MemoryDriver):
        def size(self, path: str) -> int | Failure:
            raise ZeroDivisionError(path)

    with pytest.raises(ZeroDivisionError, match="segment"):
        Patience().limited(Broken()).size(PATH)


def test_large_operations_have_more_time() -> None:
    small, large = Operation("read", PATH, 4), Operation("read", PATH, 4 << 20)
    # Less than the time after which pull consumers give up.
    assert 5 <= small.limit_s < large.limit_s < 10
    upload = Operation("write", PATH, 16 << 20, (PATH,))
    assert upload.limit_s == 46
    assert Operation("delete", PATH, changes=("a",) * 11).limit_s == 40
    assert Operation("list", PATH).limit_s == 300


@pytest.mark.parametrize("command", ["verify", "rebuild", "sweep", "restore", "copy"])
@pytest.mark.parametrize("layout", ["posix", "file"])
def test_a_command_that_meets_a_hanging_folder_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout, command: str
) -> None:
    config, released = fill(tmp_path / "a", layout), Event()
    empty = write_config(tmp_path / "b", layout, tieredStoreFilePath=folder(tmp_path / "a"))
    target = write_config(tmp_path / "c", "file")
    (tmp_path / "c").mkdir()
    for name in ("read", "entries", "size"):
        monkeypatch.setattr(PosixDriver, name, lambda *_: released.wait())
    limits_s = dict.fromkeys(operations._LIMITS_S, 0.05)
    monkeypatch.setattr(operations, "_LIMITS_S", limits_s)
    options = {"restore": ["-c", str(empty)], "copy": ["--from", str(config), "--to", str(target)]}
    said = fail(1, "tier", command, *options.get(command, ["-c", str(config)]))
    released.set()
    assert "no answer to " in said
