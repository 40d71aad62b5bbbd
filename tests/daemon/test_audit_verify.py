"""The check of an audit log finds the first line that is not as it was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from headrace_daemon.audit.lines import Link, chained, hash_of, link_of
from headrace_daemon.audit.verify import check
from tests.support.audit import checked, event, files_of, write
from tests.support.seeds import seeds

LINES = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of five lines."""
    path = tmp_path / "audit.log"
    write(path, *(event(f"e{number}") for number in range(1, LINES + 1)))
    return path


def change(path: Path, work: Callable[[list[bytes]], object]) -> str | None:
    """What the check says of changed lines."""
    lines = path.read_bytes().splitlines()
    work(lines)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return checked(path).problem


def test_a_log_as_it_was_written_is_right(path: Path) -> None:
    found = checked(path)
    assert (found.line_count, found.problem, found.notes) == (LINES, None, [])
    assert found.ends_with == hash_of(path.read_bytes().splitlines()[-1])


@pytest.mark.parametrize("number", range(1, LINES - 1))
def test_a_changed_line_is_named(path: Path, number: int) -> None:
    def alter(lines: list[bytes]) -> None:
        lines[number - 1] = lines[number - 1].replace(b'"user":null', b'"user":"bob"')

    assert change(path, alter) == f"{path}:{number}: this line was changed"


@pytest.mark.parametrize("number", range(2, LINES))
def test_a_line_with_another_previous_hash_is_named(path: Path, number: int) -> None:
    def alter(lines: list[bytes]) -> None:
        lines[number - 1] = chained(event("x"), Link(number - 1, "f" * 64))

    assert change(path, alter) == f"{path}:{number}: this line was changed"


@pytest.mark.parametrize(
    ("number", "said"),
    [(LINES - 1, "this line was changed"), (LINES, "this line or the next one was changed")],
)
def test_the_last_line_is_not_proved(path: Path, number: int, said: str) -> None:
    def alter(lines: list[bytes]) -> None:
        lines[number - 1] = chained(event("x"), Link(number - 1, "f" * 64))

    assert change(path, alter) == f"{path}:4: {said}"


@pytest.mark.parametrize("number", range(2, LINES))
@pytest.mark.parametrize("count", [1, 2])
def test_removed_lines_are_counted(path: Path, number: int, count: int) -> None:
    def remove(lines: list[bytes]) -> None:
        del lines[number - 1 : number - 1 + count]

    expected = f"{path}:{number}: {count} lines before this one were removed"
    found = change(path, remove)
    if number + count > LINES:
        assert found is None  # nothing follows that would prove it
    else:
        assert found == expected


@pytest.mark.parametrize("number", range(1, LINES + 1))
def test_an_added_line_is_named(path: Path, number: int) -> None:
    """Though whoever adds it continues the chain before it."""

    def add(lines: list[bytes]) -> None:
        end = link_of(lines[number - 2]) if number > 1 else Link(0, "0" * 64)
        lines.insert(number - 1, chained(event("x"), end))

    assert change(path, add) == f"{path}:{number}: this line was added"


@pytest.mark.parametrize("number", range(2, LINES + 1))
def test_an_added_line_without_a_chain_is_named(path: Path, number: int) -> None:
    def add(lines: list[bytes]) -> None:
        lines.insert(number - 1, chained(event("x"), Link(99, "f" * 64)))

    assert change(path, add) == f"{path}:{number}: this line was added"


def test_several_added_lines_are_found(path: Path) -> None:
    def add(lines: list[bytes]) -> None:
        lines.insert(2, chained(event("x"), link_of(lines[1])))
        lines.insert(3, chained(event("y"), link_of(lines[2])))

    assert change(path, add) == f"{path}:4: this line was added, and maybe others before it"


def test_two_lines_may_not_change_places(path: Path) -> None:
    def swap(lines: list[bytes]) -> None:
        lines[2], lines[3] = lines[3], lines[2]

    assert (change(path, swap) or "").startswith(f"{path}:3: ")


@pytest.mark.parametrize("data", [b"", b"{}", b"no JSON", b'{"number":2}', b"\xff"])
def test_what_is_no_line_of_a_log_is_named(path: Path, data: bytes) -> None:
    def add(lines: list[bytes]) -> None:
        lines.insert(2, data)

    expected = f"{path}:3: not a line of an audit log: it was changed or added"
    assert change(path, add) == expected


def test_the_first_line_has_none_before_it(path: Path) -> None:
    def alter(lines: list[bytes]) -> None:
        lines[0] = chained(event("x"), Link(0, "f" * 64))

    expected = f"{path}:1: this line was changed: the first one has none before it"
    assert change(path, alter) == expected


def test_unfinished_bytes_that_no_line_names_were_added(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, event("a"), event("b"), bytes_max=1)
    rotated = files_of(path)[0]
    rotated.write_bytes(rotated.read_bytes() + b'{"time":')
    expected = f"{rotated}:2: this unfinished line was changed or added"
    assert checked(path).problem == expected


def test_unfinished_bytes_may_not_change(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, event("a"))
    path.write_bytes(path.read_bytes() + b'{"time":"2026')
    write(path, event("b"))
    assert checked(path).problem is None
    rotated = files_of(path)[0]
    rotated.write_bytes(rotated.read_bytes()[:-1] + b"7")
    assert checked(path).problem == f"{rotated}:2: this unfinished line was changed or added"


def test_an_unfinished_line_at_the_end_is_noted(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"time"')
    found = checked(path)
    assert found.problem is None
    assert found.notes == [f"{path}:6: unfinished; the daemon was killed, or is writing it"]


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    write(path, *(event(f"e{number}") for number in range(LINES)), bytes_max=1)
    first, second, third, *_ = files_of(path)
    second.unlink()
    assert checked(path).problem == f"{third}:1: 1 lines before this one were removed"
    first.unlink()
    assert checked(path).problem is None
    assert checked(path).notes == [f"{third}:1: line 3 of the log; others came before it"]


def test_a_clock_that_was_set_back_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    times = [f"2026-11-27T12:00:0{second}.000Z" for second in (5, 6, 1, 2)]
    write(path, *(event("e", time) for time in times))
    found = checked(path)
    assert found.problem is None
    assert found.notes == [f"{path}:3: the clock was set back, from {times[1]}"]


# -- the end ---------------------------------------------------------------------------------------


def test_lines_cut_off_at_the_end_are_found_by_a_hash_that_was_kept(path: Path) -> None:
    kept = checked(path).ends_with
    assert checked(path, kept).problem is None
    assert checked(path, kept).notes == ["0 lines follow the expected one"]

    def cut(lines: list[bytes]) -> None:
        del lines[-1]

    assert change(path, cut) is None
    expected = f"no line has the hash {kept}: lines were cut off, or all were rewritten"
    assert checked(path, kept).problem == expected


def test_a_log_that_has_grown_has_the_expected_line(path: Path) -> None:
    kept = checked(path).ends_with
    write(path, event("a"), event("b"))
    assert checked(path, kept).notes == ["2 lines follow the expected one"]


def test_an_empty_log_is_right_and_has_no_expected_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.touch()
    assert check([path]).problem is None
    assert check([path], "f" * 64).problem is not None


@pytest.mark.parametrize("seed", seeds(20))
def test_no_change_of_a_byte_is_missed(path: Path, tmp_path: Path, seed: int) -> None:
    """But in the last line, which nothing proves; and the chain names a line near it."""
    random = Random(seed)
    log = tmp_path / "many.log"
    write(log, *(event(f"e{number}", user="u" * random.randrange(9)) for number in range(9)))
    data = log.read_bytes()
    proved = data[:-1].rfind(b"\n") + 1
    for _ in range(200):
        at = random.randrange(proved)
        byte = random.randrange(256)
        if byte == data[at]:
            continue
        log.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        problem = checked(log).problem
        assert problem is not None, (seed, at, byte)
        line = data.count(b"\n", 0, at) + 1
        named = int(problem.partition(": ")[0].rpartition(":")[2])
        assert line - 1 <= named <= line + 1, (seed, at, byte, problem)
