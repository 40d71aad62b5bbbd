"""``python -m examples.flights``: sends a year of flights through a topic and through Spark."""

from __future__ import annotations

import math
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio

from examples.flights.ledger import TOPIC, airlines, data_folder, run_flights
from examples.flights.stream import starting_spark, stream_delays
from examples.flights.views import flights_view, say, stream_view
from headrace.admin.output import print_rows
from headrace.embedded import run_daemons
from headrace.errors import HeadraceError
from headrace.spark.sessions import check_installed
from headrace.tasks import sole_error
from headrace_daemon.logs import configure_logs
from headrace_daemon.network import TcpNetwork

if TYPE_CHECKING:
    from examples.flights.ledger import Check, Ledger
    from examples.flights.stream import Stream, WeekDelays
    from headrace.embedded import Embedded

_STEPS = " ▁▂▃▄▅▆▇█"
_MINUTES_A_STEP = 8


@click.command("python -m examples.flights")
@click.option("--keep", is_flag=True, help="Keep broker and nameserver running at the end.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory to keep the messages in. Default: a temporary one, deleted at the end.",
)
@click.option(
    "--spark/--no-spark",
    default=None,
    help="Also stream the flights through Spark. Default: if PySpark is installed.",
)
def command(data: Path | None, *, keep: bool, spark: bool | None) -> None:
    """Stream 336 776 flights through a broker and check the result.

    The flights are keyed by tail number and tagged by carrier; a group of two consumers reads
    them. Then a Spark stream writes delays by carrier and week to a second topic; it is killed
    halfway and resumed. The exit code is 0 only if all checks hold, 2 for a wrong request.
    """
    configure_logs("warning")
    try:
        data_folder()
        checks = trio.run(_run, data, keep, _has_spark(wanted=spark))
    except* HeadraceError as errors:
        raise click.UsageError(str(sole_error(errors))) from None
    if not all(check.holds for check in checks):
        sys.exit(1)
    say("\nTry next: headrace dev, an empty broker for messages of your own")


def _has_spark(*, wanted: bool | None) -> bool:
    """True if to run the Spark part. Raises HeadraceError if it is wanted but not installed."""
    if wanted is False:
        return False
    try:
        check_installed()
    except HeadraceError as missing:
        if wanted:
            raise
        say(f"skipping Spark: {missing}")
        return False
    return True


async def _run(data: Path | None, keep: bool, with_spark: bool) -> list[Check]:
    async with run_daemons(data, network=TcpNetwork()) as mq, AsyncExitStack() as stack:
        say(f"nameserver {mq.nameserver}, broker {mq.broker}, data in {mq.data}")
        stream = None
        if with_spark:
            say("starting Spark in the background")
            stream = await stack.enter_async_context(starting_spark(mq))
        ledger, checks = await _run_flights(mq)
        if stream:
            checks += await _run_stream(mq, stream, ledger)
        if keep:
            await stack.aclose()
            await _wait_for_signal(mq)
    return checks


async def _run_flights(mq: Embedded) -> tuple[Ledger, list[Check]]:
    started = time.monotonic()
    with flights_view() as view:
        ledger = await run_flights(mq, view)
    seconds = time.monotonic() - started
    print_rows(_carrier_rows(ledger), as_json=False, empty="no flight was received")
    _print_checks(checks := ledger.checks())
    say(
        f"{ledger.received_count} flights in {seconds:.1f} s, "
        f"{ledger.received_count / seconds:,.0f} per second in one process: producer, broker, "
        "nameserver and both consumers"
    )
    return ledger, checks


async def _run_stream(mq: Embedded, stream: Stream, ledger: Ledger) -> list[Check]:
    started = time.monotonic()
    with stream_view() as view:
        streamed = await stream_delays(mq, stream, view)
    seconds = time.monotonic() - started
    print_rows(_week_rows(streamed.weeks), as_json=False, empty="Spark wrote nothing")
    _print_checks(checks := streamed.checks(ledger.carriers))
    say(f"{len(streamed.weeks)} results from Spark in {seconds:.1f} s, including a restart")
    return checks


def _print_checks(checks: list[Check]) -> None:
    for check in checks:
        say(f"{'ok    ' if check.holds else 'FAILED'}  {check.promise} ({check.detail})")


def _carrier_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Mean delays by carrier in minutes, most punctual carrier first."""
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


def _week_rows(weeks: list[WeekDelays]) -> list[dict[str, Any]]:
    """A sparkline of weekly delays per carrier, the carrier with most flights first."""
    names = airlines()
    days = sorted({week.week for week in weeks})
    by_carrier: dict[str, dict[str, WeekDelays]] = {}
    for week in weeks:
        by_carrier.setdefault(week.carrier, {})[week.week] = week
    most_flights = sorted(
        by_carrier.items(), key=lambda item: -sum(w.flights for w in item[1].values())
    )
    return [
        {
            "carrier": names[code],
            "weeks": len(of_week),
            "mean_arrival_delay_week_by_week": "".join(_bar(of_week.get(day)) for day in days),
        }
        for code, of_week in most_flights
    ]


def _bar(week: WeekDelays | None) -> str:
    """The mean delay in steps of 8 minutes; blank if none arrived or the mean is not positive."""
    if week is None or not week.arrived:
        return " "
    step = math.ceil(week.arrival_minutes / week.arrived / _MINUTES_A_STEP)
    return _STEPS[min(max(step, 0), len(_STEPS) - 1)]


async def _wait_for_signal(mq: Embedded) -> None:
    say("still running; try from another terminal:")
    say(f"  export HEADRACE_NAMESERVER='{mq.nameserver}'")
    say(f"  headrace consume {TOPIC} --tag HA --max 3 --json")
    say(f"  headrace topic describe {TOPIC}")
    say("press Ctrl-C to stop")
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            break


if __name__ == "__main__":
    command()
