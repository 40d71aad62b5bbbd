"""Progress display: bars on a terminal, lines otherwise."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from examples.flights.ledger import FLIGHT_COUNT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from examples.flights.ledger import View
    from examples.flights.stream import StreamView


def say(text: str) -> None:
    """Print a line to standard output and flush it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def flights_view() -> Iterator[View]:
    """Progress display of the flights from the producer to the consumers."""
    if not sys.stdout.isatty():
        yield _Lines()
        return
    with _progress() as progress:
        yield _Bars(progress)


@contextmanager
def stream_view() -> Iterator[StreamView]:
    """Progress display of the flights through Spark."""
    if not sys.stdout.isatty():
        yield _StreamLines()
        return
    with _progress() as progress:
        yield _StreamBar(progress)


def _progress() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        auto_refresh=False,
        expand=True,
    )


class _Lines:
    """Prints a line every two seconds."""

    interval_s = 2.0

    def show(self, sent: int, received: int, per_second: float) -> None:
        say(
            f"sent {sent}, received {received}, {per_second:,.0f} messages/s, lag {sent - received}"
        )


class _Bars:
    """Shows two progress bars."""

    interval_s = 0.1

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._sent = progress.add_task("sent", total=FLIGHT_COUNT, note="")
        self._received = progress.add_task("received", total=FLIGHT_COUNT, note="")

    def show(self, sent: int, received: int, per_second: float) -> None:
        self._progress.update(self._sent, completed=sent, note=f"lag {sent - received:>7,}")
        self._progress.update(self._received, completed=received, note=f"{per_second:>7,.0f}/s")
        self._progress.refresh()


class _StreamLines:
    """Prints a line for each micro-batch."""

    def rows(self, count: int, batch_count: int) -> None:
        say(f"streamed {count}, micro-batch {batch_count}")

    def note(self, text: str) -> None:
        say(text)


class _StreamBar:
    """Shows a progress bar, with notes above it."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._streamed = progress.add_task("streamed", total=FLIGHT_COUNT, note="")

    def rows(self, count: int, batch_count: int) -> None:
        self._progress.update(self._streamed, completed=count, note=f"micro-batch {batch_count:>3}")
        self._progress.refresh()

    def note(self, text: str) -> None:
        self._progress.console.print(text)
        self._progress.refresh()
