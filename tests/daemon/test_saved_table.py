"""A table in memory alone takes the same changes; tests of users and key-values have the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace_daemon.saved_table import Edit, SavedTable
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.waiting import at_once


class Numbers(SavedTable[str, int]):
    """error: raised by the next save."""

    def __init__(self, path: Path | None = None) -> None:
        self.in_force: dict[str, int] = {}
        self.saves: list[dict[str, int]] = []
        self.error: Exception | None = None
        super().__init__(path, {"a": 1})

    def _write(self, entries: Mapping[str, int]) -> None:
        if self.error is not None:
            raise self.error
        self.saves.append(dict(entries))

    def _put(self, key: str, value: int | None) -> None:
        if value is None:
            del self.in_force[key]
        else:
            self.in_force[key] = value


def added(entries: Mapping[str, int]) -> Edit[str, int]:
    return Edit("b", entries["a"] + 1)


def removed(entries: Mapping[str, int]) -> Edit[str, int] | None:
    return Edit("a", None) if "a" in entries else None


def test_a_table_without_a_file_changes_at_once() -> None:
    table = Numbers()
    with pytest.raises(StopIteration):
        table.change(added).send(None)  # without a wait
    table.change_now(removed)
    table.change_now(removed)
    assert table.in_force == {"b": 2}
    assert table.saves == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug")])
def test_what_is_not_saved_does_not_hold(tmp_path: Path, error: Exception) -> None:
    table = Numbers(tmp_path / "numbers.json")
    table.error = error
    with pytest.raises((RequestError, ValueError)) as caught:
        at_once(table.change(added))
    if isinstance(caught.value, RequestError):
        assert caught.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert str(tmp_path) in (caught.value.remark or "")
        assert "No space left" in (caught.value.remark or "")
    assert table.in_force == {"a": 1}
    table.error = None
    at_once(table.change(added))
    assert table.saves == [{"a": 1, "b": 2}]
    assert table.in_force == {"a": 1, "b": 2}


@pytest.mark.parametrize("existed", [True, False])
def test_a_file_that_another_program_changes_is_not_overwritten(
    tmp_path: Path, existed: bool
) -> None:
    path = tmp_path / "numbers.json"
    if existed:
        path.write_text("{}")
    table = Numbers(path)
    path.write_text('{"a":7}')
    for _ in range(2):
        with pytest.raises(RequestError, match="another program has changed it: restart this"):
            at_once(table.change(added))
    assert table.saves == []
    assert table.in_force == {"a": 1}
