"""Medians, spreads and ratios of the rounds of a comparison, as a Markdown table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OURS, THEIRS = "headrace", "apache"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
# Key of a report, heading, unit's divisor, digits.
COLUMNS = (
    ("rate", "messages/s", 1, 0),
    ("broker_cpu_us", "broker CPU, µs/message", 1, 2),
    ("p50_us", "p50, ms", 1000, 2),
    ("p99_us", "p99, ms", 1000, 2),
    ("p999_us", "p99.9, ms", 1000, 2),
    ("client_cpu_us", "client CPU, µs/message", 1, 2),
)
DAEMON_ROWS = (
    ("first_send_s", "start to first accepted send, s", 2),
    ("started_mb", "resident memory after the start, MB", 0),
    ("loaded_mb", "resident memory after the load, less mapped files, MB", 0),
    ("idle_cpu_percent", "idle CPU after the load, % of a core", 1),
)


def markdown(results: dict[str, Any]) -> str:
    """results: what ``compare`` wrote as JSON; see its ``Results``."""
    peers = results["peers"]
    parts = [_heading(results)]
    for key, title, divisor, digits in COLUMNS:
        rows = [
            [name, *_cells([peer["cases"][name] for peer in _named(peers)], key, divisor, digits)]
            for name in results["cases"]
            if any(key in report for peer in peers.values() for report in peer["cases"][name])
        ]
        if rows:
            parts.append(_table([title, *_titles(peers)], rows))
    rows = [
        [title, *_cells([peer["daemons"] for peer in _named(peers)], key, 1, digits)]
        for key, title, digits in DAEMON_ROWS
    ]
    parts.append(_table(["daemons", *_titles(peers)], rows))
    return "\n".join(parts)


def replace_table(path: Path, table: str) -> None:
    """Puts ``table`` between the two markers of a document."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no `{BEGIN}` ... `{END}` to put the table between")
    path.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}")


def _named(peers: dict[str, Any]) -> list[Any]:
    return [peers[name] for name in (OURS, THEIRS) if name in peers]


def _titles(peers: dict[str, Any]) -> list[str]:
    names = [name for name in (OURS, THEIRS) if name in peers]
    return [*names, "ratio"] if len(names) == 2 else names


def _heading(results: dict[str, Any]) -> str:
    return (
        f"Measured {results['date']} on {results['machine']}; {results['rounds']} rounds of "
        f"{results['seconds']} s. Median (smallest to largest round); ratio of medians, "
        "headrace ÷ Apache RocketMQ.\n"
    )


def _cells(peers: list[list[dict[str, float]]], key: str, divisor: float, digits: int) -> list[str]:
    series = [[report[key] / divisor for report in reports] for reports in peers]
    cells = [_spread(values, digits) for values in series]
    if len(series) == 2 and statistics.median(series[1]):
        cells.append(f"{statistics.median(series[0]) / statistics.median(series[1]):.2f}")
    return cells


def _spread(values: Sequence[float], digits: int) -> str:
    middle, low, high = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
