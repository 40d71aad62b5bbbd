"""The official clients with their defaults while the queues of a static topic move.

Every acknowledged message is read, by a consumer that is killed in the middle too, at the queue
and offset of its acknowledgement; and no send fails, even in a strict move whose queues have no
leader for longer than sends wait. Offsets have no gap if the moves are strict, else at most one for
each move, up to a multiple of 10,000.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from headrace.admin.client import Admin
from headrace_broker.statictopic.forward import WAIT_S
from headrace_protocol.statictopic.plans import Mode, Step
from tests.conformance.console import Console
from tests.conformance.peer import QUICK_JVM, Peer, driver_command
from tests.support.running_brokers import brokers

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

TOPIC = "T"
SECONDS, RATE = 20, 200
TARGETS = (["a"], ["b", "c"], ["c"], ["a", "b", "c"], ["b"])
# Messages that a consumer had consumed, and not yet committed, when it was killed.
AGAIN_MAX = 5 * RATE


class SlowTool(Admin):
    """Takes longer for each step than a send waits for its leader."""

    async def _send(self, steps: list[Step], *arguments: Any) -> None:
        until = trio.current_time() + 1.3 * WAIT_S
        await super()._send(steps, *arguments)
        if steps:
            await trio.sleep_until(until)


def load(home: Path, *arguments: str) -> list[str]:
    return [*driver_command("conformance.StaticLoad", home=home, options=QUICK_JVM), *arguments]


@contextmanager
def consuming(home: Path, nameserver: str, file: Path) -> Iterator[None]:
    with (home / "consumer.log").open("ab") as log:
        process = subprocess.Popen(
            load(home, "consume", nameserver, TOPIC, str(file)), stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def lines(file: Path) -> list[str]:
    """The whole lines of a file that may still be written."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


@pytest.mark.parametrize(
    "by",
    [
        Mode.STRICT,
        pytest.param(Mode.AVAILABLE, marks=pytest.mark.long),
        pytest.param("mqadmin", marks=pytest.mark.long),
    ],
)
async def test_nothing_is_lost_while_queues_move(
    tmp_path: Path, console: Console, by: Mode | str
) -> None:
    acknowledged, read = tmp_path / "acknowledged", tmp_path / "read"
    async with (
        brokers(tmp_path, ["a", "b", "c"], memory=False) as mq,
        Admin(nameserver=mq.nameserver) as admin,
        SlowTool(nameserver=mq.nameserver) as slow_tool,
        trio.open_nursery() as nursery,
    ):
        await admin.create_static_topic(TOPIC, 8)
        outputs: list[bytes] = []
        peer = Peer("headrace", mq.nameserver, mq.brokers["a"].address, {}, 0)

        async def move(target: list[str]) -> None:
            if isinstance(by, Mode):
                is_slow = by is Mode.STRICT and target == TARGETS[1]
                tool = slow_tool if is_slow else admin
                await tool.remap_static_topic(TOPIC, target, mode=by)
            else:
                words = ("remappingStaticTopic", "-t", TOPIC, "-b", ",".join(target))
                printed = await trio.to_thread.run_sync(lambda: console.printed(peer, *words))
                assert "Exception" not in printed, printed
            await trio.sleep(1)

        async def produce() -> None:
            command = load(
                tmp_path,
                *("produce", mq.nameserver, TOPIC, str(acknowledged), str(SECONDS), str(RATE)),
            )
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
            outputs.append(done.stdout + done.stderr)

        nursery.start_soon(produce)
        with consuming(tmp_path, mq.nameserver, read):
            while len(lines(read)) < 2 * RATE:  # noqa: ASYNC110 - another process writes it
                await trio.sleep(0.1)
            for target in TARGETS[:3]:
                await move(target)
        with consuming(tmp_path, mq.nameserver, read):
            for target in TARGETS[3:]:
                await move(target)
            with trio.fail_after(120):
                while not outputs or missing(acknowledged, read):  # noqa: ASYNC110
                    await trio.sleep(0.2)
    assert b"failed 0" in outputs[0], outputs[0]
    found = lines(read)
    assert len(found) - len(set(found)) <= AGAIN_MAX
    assert len({line.split()[0] for line in found}) == len(set(found)) == SECONDS * RATE
    for offsets in offsets_by_queue(found).values():
        jumps = [after for before, after in pairwise([-1, *offsets]) if after != before + 1]
        assert len(jumps) <= (0 if by is Mode.STRICT else len(TARGETS))
        assert not any(jump % 10_000 for jump in jumps)


def offsets_by_queue(found: list[str]) -> dict[str, list[int]]:
    """The offsets of the messages of each queue, in order."""
    offsets: defaultdict[str, set[int]] = defaultdict(set)
    for line in found:
        _, queue, offset = line.split()
        offsets[queue].add(int(offset))
    return {queue: sorted(some) for queue, some in offsets.items()}


def missing(acknowledged: Path, read: Path) -> set[str]:
    """Acknowledgements, of decided offsets, that were not read at the same place."""
    expected = {line for line in lines(acknowledged) if not line.endswith(" -1")}
    return expected - set(lines(read))
