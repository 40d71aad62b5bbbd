"""``headrace demo``: a year of flights through a topic and back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.admin.failures import FAILED
from headrace.admin.output import print_rows

if TYPE_CHECKING:
    from headrace.demo import Check, Ledger, View
    from headrace.embedded import Embedded


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave broker and nameserver running at the end.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Keep the messages here; else in a temporary folder, gone at the end."),
    ] = None,
) -> None:
    """Stream 336 776 flights through an embedded broker and check what comes back.

    The flights are keyed by tail number and tagged by carrier; a group of two consumers reads
    them. Ends by itself, with exit code 0 only if all checks hold.
    """
    import trio

    from headrace.demo import data_folder
    from headrace_protocol.drivers.logs import configure_logs

    data_folder()
    configure_logs("warning")
    checks = trio.run(_run, data, keep)
    if not all(check.holds for check in checks):
        raise typer.Exit(FAILED)


async def _run(data: Path | None, keep: bool) -> list[Check]:
    from headrace.demo import run_flights
    from headrace.embedded import run_daemons
    from headrace_protocol.drivers.network import TcpNetwork

    async with run_daemons(data, network=TcpNetwork()) as mq:
        _say(f"nameserver {mq.nameserver}, broker {mq.broker}, data in {mq.data}")
        started = time.monotonic()
        with _view() as view:
            ledger = await run_flights(mq, view)
        checks = ledger.checks()
        _print_result(ledger, checks, time.monotonic() - started)
        if keep:
            await _wait_for_signal(mq)
    return checks


def _print_result(ledger: Ledger, checks: list[Check], seconds: float) -> None:
    print_rows(_carrier_rows(ledger), as_json=False, empty="no flight came back")
    for check in checks:
        _say(f"{'ok    ' if check.holds else 'FAILED'}  {check.promise} ({check.detail})")
    _say(
        f"{ledger.received_count} flights in {seconds:.1f} s, "
        f"{ledger.received_count / seconds:,.0f} a second through one process: producer, broker, "
        "nameserver and both consumers"
    )


def _carrier_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Delays by carrier, in minutes, the most punctual first."""
    from headrace.demo import airlines

    names = airlines()
    rows: list[dict[str, Any]] = [
        {
            "carrier": names[code],
            "flights": delays.flights,
            "cancelled": delays.flights - delays.departed,
            "mean_departure_delay_min": delays.departure_minutes / max(delays.departed, 1),
            "mean_arrival_delay_min": delays.arrival_minutes / max(delays.arrived, 1),
        }
        for code, delays in ledger.carriers.items()
    ]
    return sorted(rows, key=lambda row: float(row["mean_arrival_delay_min"]))


async def _wait_for_signal(mq: Embedded) -> None:
    import signal

    import trio

    from headrace.demo import TOPIC

    _say("still running; from another terminal, for example:")
    _say(f"  export HEADRACE_NAMESERVER='{mq.nameserver}'")
    _say(f"  headrace consume {TOPIC} --tags HA --max 3 --json")
    _say(f"  headrace topic describe {TOPIC}")
    _say("Ctrl-C ends it")
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            break


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _view() -> Iterator[View]:
    if not sys.stdout.isatty():
        yield _Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        auto_refresh=False,
        expand=True,
    ) as progress:
        yield _Bars(progress)


class _Lines:
    """A line every other second."""

    interval_s = 2.0

    def show(self, sent: int, received: int, per_second: float) -> None:
        _say(
            f"sent {sent}, received {received}, {per_second:,.0f} messages/s, lag {sent - received}"
        )


class _Bars:
    """Two bars that grow."""

    interval_s = 0.1

    def __init__(self, progress: Any) -> None:
        from headrace.demo import FLIGHT_COUNT

        self._progress = progress
        self._sent = progress.add_task("sent", total=FLIGHT_COUNT, note="")
        self._received = progress.add_task("received", total=FLIGHT_COUNT, note="")

    def show(self, sent: int, received: int, per_second: float) -> None:
        self._progress.update(self._sent, completed=sent, note=f"lag {sent - received:>7,}")
        self._progress.update(self._received, completed=received, note=f"{per_second:>7,.0f}/s")
        self._progress.refresh()
