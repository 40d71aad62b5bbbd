"""The options that all groups of cases share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from tests.bench.load import PEERS


def option_parser(
    group: str,
    explanation: str | None,
    cases: Iterable[str] = (),
    peers: Sequence[str] = PEERS,
) -> argparse.ArgumentParser:
    """With --peers, --only for ``cases`` and --keep."""
    parser = argparse.ArgumentParser(f"tests.bench {group}", description=explanation)
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers)
    parser.add_argument(
        "--keep", action="store_true", help="publish this run: results, charts and docs/benchmarks"
    )
    parser.set_defaults(only=None)
    if cases:
        parser.add_argument("--only", nargs="+", choices=cases, metavar="CASE")
    return parser


def parse(parser: argparse.ArgumentParser, options: list[str]) -> argparse.Namespace:
    """Ends the program with what is wrong."""
    chosen = parser.parse_args(options)
    if chosen.keep and (chosen.only or set(chosen.peers) != set(PEERS)):
        parser.error("--keep is for whole runs: leave out --only and --peers")
    return chosen
