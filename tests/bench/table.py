"""Medians, spreads and ratios of the rounds of a comparison, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OURS, THEIRS = "headrace", "apache"
# Key of a report, heading, unit's divisor, digits.
COLUMNS = (
    ("rate", "messages/s", 1, 0),
    ("broker_cpu_us", "broker CPU, µs/message", 1, 2),
    ("p50_us", "p50, ms", 1000, 2),
    ("p99_us", "p99, ms", 1000, 2),
    ("p999_us", "p99.9, ms", 1000, 2),
    ("max_us", "longest, ms", 1000, 2),
    ("client_cpu_us", "client CPU, µs/message", 1, 2),
)


def tables(
    results: dict[str, Any], cases: Iterable[str], columns: Sequence[tuple[str, str, float, int]]
) -> str:
    """One table for each column that was measured, one row for each case.

    results: ``peers`` has reports by peer and case.
    """
    peers = results["peers"]
    parts = []
    for key, title, divisor, digits in columns:
        rows = [
            [case, *cells(series, divisor, digits)]
            for case, series in ((case, _series(peers, case, key)) for case in cases)
            if series
        ]
        if rows:
            parts.append(rows_as_table([title, *titles(peers)], rows))
    return "\n".join(parts)


def case_table(
    results: dict[str, Any], case: str, columns: Sequence[tuple[str, str, float, int]]
) -> str:
    """One table of a single case, one row for each column."""
    peers = results["peers"]
    rows = [
        [title, *cells(series, divisor, digits)]
        for key, title, divisor, digits in columns
        if (series := _series(peers, case, key))
    ]
    return rows_as_table([case, *titles(peers)], rows)


def _series(peers: dict[str, Any], case: str, key: str) -> list[list[float]]:
    """The figures of each peer; empty when nobody has any."""
    series = [
        [report[key] for report in peer.get(case, ()) if key in report] for peer in _named(peers)
    ]
    return series if any(series) else []


def replace_table(path: Path, table: str, name: str) -> None:
    """Puts ``table`` between the two markers of that name in a document."""
    begin_mark, end_mark = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text()
    before, begin, rest = text.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"{path} has no `{begin_mark}` ... `{end_mark}` to put the table between")
    path.write_text(f"{before}{begin_mark}\n\n{table}\n{end_mark}{after}")


def _named(peers: dict[str, Any]) -> list[Any]:
    return [peers[name] for name in (OURS, THEIRS) if name in peers]


def titles(peers: dict[str, Any]) -> list[str]:
    """Headings of the cells of a row."""
    names = [name for name in (OURS, THEIRS) if name in peers]
    return [*names, "ratio"] if len(names) == 2 else names


def heading(results: dict[str, Any]) -> str:
    """The origin of a table."""
    return (
        f"Measured {results['date']} on {results['machine']}; {_rounds(results['rounds'])} of "
        f"{results['seconds']:g} s. Median (smallest to largest round); ratio of medians, "
        "headrace ÷ Apache RocketMQ.\n"
    )


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def cells(series: list[list[float]], divisor: float, digits: int) -> list[str]:
    """The spread of each peer, and the ratio of the first to the second."""
    texts = [spread(values, divisor, digits) for values in series]
    if len(series) == 2:
        texts.append(_ratio(*series))
    return texts


def _ratio(ours: list[float], theirs: list[float]) -> str:
    if not ours or not theirs or not statistics.median(theirs):
        return ""
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}"


def spread(values: Sequence[float], divisor: float, digits: int) -> str:
    """Median, smallest and largest; the value alone when it is the only one."""
    if not values:
        return ""
    middle, low, high = (
        f"{value / divisor:,.{digits}f}"
        for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def rows_as_table(titles: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose numbers stand to the right."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
