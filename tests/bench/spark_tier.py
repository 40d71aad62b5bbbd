"""Spark reading a tier itself beside reading it through the broker: bench BENCH=spark-tier.

The broker reads everything from the tier (FORCE), so both read the same bytes of the same place.
The goes alternate in one warm session.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.tier_bodies import TierStatus
from headrace_protocol.tier_headers import TierStatusHeader
from tests.bench.load import say
from tests.bench.spark import PEERS, Place, fill, run_spark
from tests.bench.spark_job import Case
from tests.conformance.peer import running

if TYPE_CHECKING:
    from collections.abc import Sequence

MASTER: Final = "local[2]"
TOPIC: Final = "history"
BODY_BYTES: Final = 1024
ROWS: Final = 500_000
SHORT_ROWS: Final = 200_000
GOES: Final = 5
RATIO_BAR: Final = 1.5
CPU_BAR_PERCENT: Final = 5.0
LAYOUTS: Final = ("posix", "file")
DIRECT: Final = {"tier": "direct"}
UPLOAD_TIMEOUT_S: Final = 600


def main(arguments: Sequence[str]) -> int:
    """Print the figures of both layouts; 0 if the bars are met."""
    rows = SHORT_ROWS if "--short" in arguments else ROWS
    return min([measure(layout, rows) for layout in LAYOUTS]) ^ 1


def measure(layout: str, rows: int) -> int:
    """Print the figures of a layout; 1 if the bars are met."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "messageStorePlugIn": "tieredstore",
            "tieredBackendServiceProvider": layout,
            "tieredStoreFilePath": f"{directory}/tier",
            "tieredStoreGroupCommitTimeout": "500",
            "tieredStorageLevel": "FORCE",
        }
        with running("headrace", Path(directory), settings=settings) as peer:
            place = Place(peer.nameserver, peer.broker_pid)
            fill(PEERS["headrace"], place, TOPIC, BODY_BYTES, rows)
            wait_for_upload(peer.broker)
            cases = [
                Case(name, "batch", TOPIC, rows, BODY_BYTES, options=options)
                for go in range(GOES + 1)
                for name, options in (("broker", {}), ("direct", DIRECT))
            ]
            reports = list(run_spark(PEERS["headrace"], place, MASTER, cases))
    counted = reports[2:]
    rate, cpu = {}, {}
    for name in ("broker", "direct"):
        its = [report for report in counted if report.name == name]
        rate[name] = statistics.median(report.rate for report in its)
        cpu[name] = statistics.median(r.broker_cpu_us * r.rate / 1e4 for r in its)
        say(f"{layout} {name}: {rate[name]:,.0f} rows/s, broker CPU {cpu[name]:.1f} %")
    pairs = zip(counted[::2], counted[1::2], strict=True)
    ratio = statistics.median(direct.rate / broker.rate for broker, direct in pairs)
    is_met = ratio >= RATIO_BAR and cpu["direct"] <= CPU_BAR_PERCENT
    say(f"{layout}: {ratio:.2f} x (>= {RATIO_BAR}), {'met' if is_met else 'missed'}")
    return int(is_met)


def wait_for_upload(address: str) -> None:
    """Until everything is in the tier. Raises TimeoutError."""
    deadline = time.monotonic() + UPLOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        with BlockingConnection.connect(address) as connection:
            header = TierStatusHeader(max_num=1)
            answer = connection.request(RequestCode.TIER_STATUS, header, timeout_ms=30_000)
        (queue,) = answer.expect().decode(TierStatus).queues
        if not queue.behind_messages:
            return
        time.sleep(0.5)
    raise TimeoutError(f"{queue.behind_messages} messages are not uploaded")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
