"""Command output: tables on a terminal, tab-separated columns in a pipe, JSON on request."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace.admin.terminal import clean_json
from headrace_daemon.command import clean, warn

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.bodies import MessageQueue

Row = Mapping[str, Any]
Item = TypeVar("Item")

_WIDTH_MAX = 100_000


def print_rows(rows: Sequence[Row], *, as_json: bool, empty: str) -> None:
    """Print rows with identical keys, which serve as JSON names and headings.

    empty: message for standard error if there are no rows.
    """
    if as_json:
        print_json(list(rows))
    elif not rows:
        sys.stderr.write(f"{clean(empty)}\n")
    elif sys.stdout.isatty():
        _print_table(rows)
    else:
        _write_line(rows[0])
        for row in rows:
            _write_line(map(_cell, row.values()))


def print_findings(counts: Row, rows: Sequence[Row], *, as_json: bool) -> None:
    """Print what a check has found, and counts of what it has read."""
    if as_json:
        print_json({**counts, "findings": rows})
        return
    print_rows(rows, as_json=False, empty="no problems found")
    sys.stderr.write(", ".join(f"{name} {value}" for name, value in counts.items()) + "\n")


def print_record(record: Row, *, as_json: bool) -> None:
    """Print a single record, one line per value."""
    if as_json:
        print_json(record)
        return
    if sys.stdout.isatty():
        _print_record(record)
    else:
        for name, value in record.items():
            _write_line((name, _cell(value)))


def _print_record(record: Row) -> None:
    width = max(map(len, record)) + 2
    for name, value in record.items():
        sys.stdout.write(f"{_heading(name):{width}}{_cell(value)}\n")


def print_json_line(record: Row) -> None:
    """Print one item of a stream as a line of JSON."""
    sys.stdout.buffer.write(clean_json(msgspec.json.encode(record)) + b"\n")


@contextmanager
def warned_if(allow_partial: bool) -> Iterator[list[BrokerProblem] | None]:
    """As ``warned`` if a part is enough; otherwise None, and the first problem is an error."""
    if not allow_partial:
        yield None
        return
    with warned() as problems:
        yield problems


@contextmanager
def warned() -> Iterator[list[BrokerProblem]]:
    """A list for ``problems`` of Admin's methods; the end of the block prints each as a warning."""
    problems: list[BrokerProblem] = []
    try:
        yield problems
    finally:
        for problem in problems:
            warn(f"skipped: {problem}")


def with_problems(rows: Sequence[Row], problems: Sequence[BrokerProblem] | None) -> Sequence[Row]:
    """``rows`` plus one row per problem, with a last column ``problem`` if there are problems."""
    if not problems:
        return rows
    names = [name for row in rows for name in row] or ["broker"]
    failed = [{"broker": each.broker_name, "problem": str(each)} for each in problems]
    columns = dict.fromkeys([*names, "problem"])
    return [{name: row.get(name) for name in columns} for row in (*rows, *failed)]


def newest_of_each(
    items: Sequence[Item], count: int, broker_of: Callable[[Item], str], more: str
) -> list[Item]:
    """The last ``count`` items of each broker; warns with ``more`` if there are others."""
    by_broker: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_broker[broker_of(item)].append(item)
    if brokers := [broker for broker, found in by_broker.items() if len(found) > count]:
        warn(f"{', '.join(brokers)}: {more}")
    listed = {id(item) for found in by_broker.values() for item in found[-count:]}
    return [item for item in items if id(item) in listed]


def queue_columns(queue: MessageQueue) -> dict[str, Any]:
    """The columns that name a queue."""
    return {"topic": queue.topic, "broker": queue.broker_name, "queue": queue.queue_id}


def queue_text(queue: MessageQueue) -> str:
    """A queue as topic/broker/number."""
    return "/".join(map(str, queue_columns(queue).values()))


def counted(count: int, what: str) -> str:
    """A number with its noun: ``counted(1, "message")`` is "1 message"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def time_text(timestamp_ms: int) -> str | None:
    """Milliseconds since 1970 as ISO 8601 in UTC; None for 0 or less, which means never."""
    if timestamp_ms <= 0:
        return None
    try:
        time = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # a forged timestamp
        return f"{timestamp_ms} ms"
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def print_json(value: object) -> None:
    """Print one JSON value, indented."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2)
    sys.stdout.buffer.write(clean_json(text) + b"\n")


def _write_line(cells: Iterable[str]) -> None:
    sys.stdout.write("\t".join(cells) + "\n")


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: object) -> str:
    return clean(_text(value))


def _text(value: object) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={part}" for name, part in value.items())
    return str(value)


def _number(value: float) -> str:
    """One decimal place; for numbers below 10, three significant digits."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"


def _print_table(rows: Sequence[Row]) -> None:
    """Print a table whose words stay whole, or records if the terminal is too narrow for it."""
    from rich.console import Console

    console, table = Console(), _table(rows)
    # A console measures no more than its own width, and a dumb one has a width with a height only.
    if Console(width=_WIDTH_MAX, height=1).measure(table).minimum < console.width:
        console.print(table)
        return
    for row in rows:
        _print_record(row)
        sys.stdout.write("\n")


def _longest_word(text: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.split()), default=0)


def _table(rows: Sequence[Row]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    cells = [[_cell(value) for value in row.values()] for row in rows]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for (name, value), *column in zip(rows[0].items(), *cells, strict=True):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        table.add_column(
            _heading(name),
            justify="right" if is_number else "left",
            overflow="fold",
            min_width=max(map(_longest_word, (_heading(name), *column))),
        )
    for row in cells:
        # Names of topics and groups are data: rich must not read brackets in them as markup.
        table.add_row(*map(Text, row))
    return table
