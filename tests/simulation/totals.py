"""The totals of many seeds, kept in a file that a later run continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec


class Outcome(NamedTuple):
    """The counts of a run that kept every promise.

    seconds: on the run's own clock. loss_window_s: how long before a power cut the oldest message
    was acknowledged that the cut took back; only asynchronous flush may lose any.
    """

    kind: str
    counts: Counter[str]
    faults: Counter[str]
    seconds: float = 0.0
    loss_window_s: float = 0.0


class KindTotals(msgspec.Struct):
    """Outcomes of one kind."""

    seed_count: int = 0
    seconds: float = 0.0
    loss_window_s: float = 0.0
    counts: dict[str, int] = {}
    faults: dict[str, int] = {}

    def add(self, outcome: Outcome) -> None:
        """Count one more."""
        self.seed_count += 1
        self.seconds += outcome.seconds
        self.loss_window_s = max(self.loss_window_s, outcome.loss_window_s)
        for ours, theirs in ((self.counts, outcome.counts), (self.faults, outcome.faults)):
            for name, count in theirs.items():
                ours[name] = ours.get(name, 0) + count


class Totals(msgspec.Struct):
    """Outcomes of the seeds from ``first_seed`` on, and the seeds among them that failed."""

    first_seed: int
    seed_count: int = 0
    failed: list[int] = []
    kinds: dict[str, KindTotals] = {}

    @classmethod
    def load(cls, path: Path) -> Totals:
        """Raises OSError, msgspec.ValidationError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def save(self, path: Path) -> None:
        """Replace the file."""
        text = msgspec.json.format(msgspec.json.encode(self, order="sorted"))
        new = path.with_suffix(".tmp")
        new.write_bytes(text + b"\n")
        new.replace(path)

    def add(self, outcome: Outcome) -> None:
        """Count one more that kept every promise."""
        self.seed_count += 1
        self.kinds.setdefault(outcome.kind, KindTotals()).add(outcome)

    def add_failed(self, seed: int) -> None:
        """Count one more that did not."""
        self.seed_count += 1
        self.failed.append(seed)

    def as_text(self) -> str:
        """A sentence and a table with a column for each kind, in Markdown."""
        rows = ["| " + " | ".join(row) + " |" for row in self._rows()]
        seeds = f"{self.seed_count:,} seeds from {self.first_seed} on"
        return "\n".join([f"{seeds}, {len(self.failed)} of them broke a promise.", "", *rows])

    def _rows(self) -> Iterator[list[str]]:
        kinds = [self.kinds[name] for name in sorted(self.kinds)]
        yield ["", *sorted(self.kinds)]
        yield ["---", *["---:"] * len(kinds)]
        yield ["seeds", *[f"{kind.seed_count:,}" for kind in kinds]]
        yield ["simulated hours", *[_number(kind.seconds / 3600) for kind in kinds]]
        for name in sorted({name for kind in kinds for name in kind.counts}):
            yield [name, *[f"{kind.counts.get(name, 0):,}" for kind in kinds]]
        yield ["longest loss window, s", *[_number(kind.loss_window_s) for kind in kinds]]
        for name in sorted(
            {name for kind in kinds for name, count in kind.faults.items() if count}
        ):
            yield [f"fault: {name}", *[f"{kind.faults.get(name, 0):,}" for kind in kinds]]


def _number(value: float) -> str:
    return f"{value:,.2f}" if value else "0"
