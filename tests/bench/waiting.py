"""Messages that wait: delays, timers, transactions and retries beside Apache RocketMQ.

The same Java program drives both peers. What a million waiting timers and ten thousand open halves
cost is measured on headrace alone.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.blocking import Admin
from tests.bench.bars import WAITING, bars_table
from tests.bench.load import FIRST_SEND_TIMEOUT_S, SENDS, Load, loaded, say
from tests.bench.options import option_parser, parse
from tests.bench.processes import resident_mb
from tests.bench.results import keep, stamp
from tests.bench.table import OURS, case_table, heading, tables
from tests.bench.wire import Client, Rotation, call_until_accepted, send_frame, topic_frame
from tests.conformance.probe import wait_for_send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.driver import Report
    from tests.conformance.peer import Peer

BODY_BYTES = 100
QUEUES = 8
WARM_UP_S = 3
PACED_RATE = 10_000
IN_FLIGHT = 1000
PACED: dict[str, dict[str, Any]] = {
    "level 1 at 10,000/s": {"delayLevel": 1},
    "timer of 3 s at 10,000/s": {"timerMillis": 3000},
}
THROUGHPUT: dict[str, dict[str, Any]] = {
    "delay level 1": {"work": "delayed", "delayLevel": 1, "inFlight": IN_FLIGHT},
    "timer of 2 s": {"work": "delayed", "timerMillis": 2000, "inFlight": IN_FLIGHT},
    "transactions": {"work": "transactions", "threads": 32},
    "send-back": {"work": "send_back", "inFlight": IN_FLIGHT},
}
# The delay that passes within the window of a throughput.
DELAY_S = {"delay level 1": 1.0, "timer of 2 s": 2.0, "send-back": 1.0}
AT_ONCE = "10,000 timers at once"
AT_ONCE_COUNT = 10_000
AT_ONCE_AHEAD_S = 10
CASES = [*PACED, AT_ONCE, *THROUGHPUT]
STORED = "with what waits"
COLUMNS = (
    ("rate", "messages/s", 1, 0),
    ("p50_us", "p50 after due, ms", 1000, 2),
    ("p99_us", "p99 after due, ms", 1000, 2),
    ("max_us", "longest after due, ms", 1000, 2),
    ("broker_cpu_us", "broker CPU, µs/message", 1, 2),
)
STORED_COLUMNS = (
    ("p99_ratio", "p99 of paced sends, with ÷ without", 1, 2),
    ("timer_bytes", "memory of a waiting timer beside the wheel, bytes", 1, 0),
    ("first_send_s", "restart to the first accepted send, s", 1, 2),
)


# -- beside Apache RocketMQ ------------------------------------------------------------------------


def measure_peer(load: Load, messages: int, seconds: float) -> Iterator[tuple[str, Report]]:
    """Every case on one peer."""
    load.warm_up(WARM_UP_S, BODY_BYTES)
    for case, work in THROUGHPUT.items():  # so that the JVMs have compiled them
        load.job(work, f"WARM_{work['work']}_{len(case)}", BODY_BYTES, messages=messages // 10)
    for number, (case, delay) in enumerate(PACED.items()):
        job = {"work": "end_to_end", "rate": PACED_RATE, **delay}
        report = load.job(job, f"PACED_{number}", BODY_BYTES, seconds=seconds)
        del report["rate"]  # of the window, which is longer by the delay
        yield case, report
    yield AT_ONCE, measure_at_once(load.peer, AT_ONCE_COUNT, AT_ONCE_AHEAD_S)
    for number, (case, work) in enumerate(THROUGHPUT.items()):
        report = load.job(work, f"WAITING_{number}", BODY_BYTES, messages=messages)
        report["rate"] = messages / (report["seconds"] - DELAY_S.get(case, 0))
        yield case, report


def measure_at_once(peer: Peer, count: int, ahead_s: int) -> Report:
    """How long the last of many timers takes that are all due in one millisecond, ahead_s from now.

    It is delivered when it is in its topic; a consumer is not needed to see that.
    """
    due_s = int(time.time()) + ahead_s
    stored = fill(peer.broker, "AT_ONCE", count, f"TIMER_DELIVER_MS\x01{due_s}000\x02")
    if time.time() > due_s:
        raise RuntimeError(f"{stored} timers could not be stored in {ahead_s} s")
    time.sleep(due_s - time.time())
    with Admin(nameserver=peer.nameserver) as admin:
        while sum(each.max_offset for each in admin.topic_stats("AT_ONCE").values()) < stored:
            time.sleep(0.001)
    return {"max_us": (time.time() - due_s) * 1e6}


# -- what waits, on headrace -----------------------------------------------------------------------


def measure_stored(load: Load, timers: int, halves: int, seconds: float) -> Report:
    """Paced sends before and after so much waits, the memory of it, and a restart with it."""
    load.warm_up(WARM_UP_S, BODY_BYTES)
    rate = load.job(SENDS["async-1000"], "PEAK", BODY_BYTES, seconds=seconds)["rate"] / 2
    paced = {"work": "paced", "rate": rate}
    before = load.job(paced, "PACED", BODY_BYTES, seconds=seconds)
    pids = [load.peer.broker_pid]
    fill(load.peer.broker, "TIMERS", 1, "TIMER_DELAY_SEC\x013600\x02")
    empty_mb = resident_mb(pids, mapped_files=False)
    fill(load.peer.broker, "TIMERS", timers, "TIMER_DELAY_SEC\x013600\x02")
    timers_mb = resident_mb(pids, mapped_files=False) - empty_mb
    fill(load.peer.broker, "HALVES", halves, "TRAN_MSG\x01true\x02PGROUP\x01nobody\x02", sys_flag=4)
    after = load.job(paced, "PACED", BODY_BYTES, seconds=seconds)
    load.job({"work": "close"})
    return {
        "p99_ratio": after["p99_us"] / before["p99_us"],
        "timer_bytes": timers_mb * 1e6 / timers,
        "first_send_s": restart_s(load),
    }


def fill(address: str, topic: str, count: int, properties: str, *, sys_flag: int = 0) -> int:
    """Store messages that wait; returns how many, which are a few more than ``count``."""
    body = bytes(BODY_BYTES)
    frames = itertools.cycle(
        send_frame(topic, queue, body, sys_flag=sys_flag, properties=properties)
        for queue in range(QUEUES)
    )
    with Client(address) as client:
        client.call(topic_frame(topic, QUEUES))
        call_until_accepted(client, next(frames))
        return 1 + Rotation([client], frames).run(count=count - 1)


def restart_s(load: Load) -> float:
    """Stop the broker in order and start it again."""
    broker = load.peer.daemons["broker"]
    broker.stop()
    began = time.monotonic()
    load.peer.daemons["broker"] = broker.again()
    wait_for_send(load.peer.broker, FIRST_SEND_TIMEOUT_S)
    return time.monotonic() - began


# -- a run -----------------------------------------------------------------------------------------


def measure(chosen: Any, directory: Path) -> dict[str, Any]:
    """All figures: a report for each round, by peer and case."""
    reports: dict[str, dict[str, list[Report]]] = {name: {} for name in chosen.peers}
    for number, name in itertools.product(range(chosen.rounds), chosen.peers):
        say(f"round {number + 1} of {chosen.rounds}: {name}")
        with loaded(name, directory) as load:
            for case, report in measure_peer(load, chosen.messages, chosen.seconds):
                add(reports[name], case, report)
    if OURS in reports:
        with loaded(OURS, directory, settings={}) as load:
            report = measure_stored(load, chosen.timers, chosen.halves, chosen.seconds)
            add(reports[OURS], STORED, report)
    return {
        **stamp(),
        "rounds": chosen.rounds,
        "seconds": chosen.seconds,
        "timers": chosen.timers,
        "halves": chosen.halves,
        "peers": reports,
    }


def add(reports: dict[str, list[Report]], case: str, report: Report) -> None:
    reports.setdefault(case, []).append(report)
    columns = (*COLUMNS, *STORED_COLUMNS)
    figures = (f"{key} {report[key]:,.2f}" for key, *_ in columns if key in report)
    say(f"{case:26} {'  '.join(figures)}")


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    stored = {"peers": {OURS: results["peers"].get(OURS, {})}}
    parts = [
        heading(results),
        bars_table(WAITING, results["peers"]),
        tables(results, CASES, COLUMNS),
        f"{results['timers']:,} waiting timers and {results['halves']:,} open halves.\n",
        case_table(stored, STORED, STORED_COLUMNS),
    ]
    return "\n".join(filter(None, parts))


def main(options: list[str]) -> None:
    parser = option_parser("waiting", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5, help="of each paced load")
    parser.add_argument("--messages", type=int, default=100_000, help="of each throughput")
    parser.add_argument("--timers", type=int, default=1_000_000, help="that wait")
    parser.add_argument("--halves", type=int, default=10_000, help="that are open")
    chosen = parse(parser, options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = measure(chosen, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("waiting", results, table)
