"""Compaction beside Kafka's log cleaner and Apache RocketMQ: one queue, each key many times.

Each system gets the same keys and bodies, then compacts once, with the data in the page cache.
Measured from the start of the run to its end; a run of headrace includes the start of its process.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from headrace_broker.compaction.marker_times import MarkerTimes
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.run import Job
from headrace_broker.compaction.segments import COMPACTING, Folders
from headrace_broker.compaction.units import FileSizes
from headrace_broker.compaction.worker import Task, run_in_process
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.queues.queue_blocks import QueueBlock
from headrace_protocol.codes import RequestCode
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns, encode_records
from headrace_protocol.message import encode_batch, encode_properties
from tests.bench import compacted_topics, compaction_beside, compaction_lookups
from tests.bench.kafka_peer import running_kafka
from tests.bench.options import option_parser, parse
from tests.bench.processes import cpu_s
from tests.bench.wire import Client, call_until_accepted, frame, send_frame
from tests.conformance.peer import PeerError, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
TOPIC = "COMPACTED"
FILE_BYTES = 100 * MIB
MAP_BYTES = 100 * MIB
BLOCK_MESSAGES = 4000
TIMEOUT_S = 300
# The cases that need no other system: a compacted topic compared with a plain one, what it costs a
# plain one of the same broker, and look-ups by key.
PARTS: dict[str, Callable[[Path, int, int], None]] = {
    "topics": compacted_topics.measure,
    "beside": compaction_beside.measure,
    "lookups": compaction_lookups.measure,
}
LOOK_S = 0.005


class Load(NamedTuple):
    """What each system gets: the key and the body of each message."""

    keys: list[str]
    body_bytes: int

    @classmethod
    def of(cls, mib: int, body_bytes: int, key_count: int) -> Load:
        numbers = np.random.default_rng(1).integers(0, key_count, mib * MIB // body_bytes)
        return cls([f"user-{number}" for number in numbers.tolist()], body_bytes)

    def bodies(self) -> Iterator[bytes]:
        """Random, so that no system compresses them."""
        pool = os.urandom(MIB)
        for number in range(len(self.keys)):
            at = number * 37 % (MIB - self.body_bytes)
            yield pool[at : at + self.body_bytes]


class Run(NamedTuple):
    """One compaction. cpu_s: of the process that runs it."""

    system: str
    seconds: float
    cpu_s: float
    bytes_before: int
    bytes_after: int


# -- headrace --------------------------------------------------------------------------------------


def run_headrace(load: Load, home: Path) -> Run:
    folders, sizes, fs = Folders.of(home, TOPIC, 0), FileSizes.of(FILE_BYTES, 10 * MIB), Files()
    log = QueueLog(folders, sizes, fs)
    bodies = load.bodies()
    for first in range(0, len(load.keys), BLOCK_MESSAGES):
        log.append(_block(first, load.keys[first : first + BLOCK_MESSAGES], bodies))
    log.roll()
    log.sync()
    below = folders.below(COMPACTING)
    task = Task(
        (str(folders.log), str(folders.units)),
        (str(below.log), str(below.units)),
        sizes,
        [(segment.base, segment.count) for segment in log.segments],
        Job(0, 1, 1, 0, MarkerTimes([], []), MAP_BYTES),
    )
    cpu, start = _children_cpu_s(), time.perf_counter()
    result = run_in_process(task, lambda _bytes: None)
    seconds = time.perf_counter() - start
    assert result.kept_count == len(set(load.keys))
    return Run(
        "headrace",
        seconds,
        _children_cpu_s() - cpu,
        sum(segment.log_end for segment in log.segments),
        sum(file.log_end for group in result.groups for file in group.new),
    )


def _block(first: int, keys: list[str], bodies: Iterator[bytes]) -> QueueBlock:
    properties = [
        encode_properties({"UNIQ_KEY": f"{first + number:032X}", "KEYS": key, "WAIT": "true"})
        for number, key in enumerate(keys)
    ]
    encoded = encode_records(
        TOPIC, [next(bodies) for _ in keys], properties, born_timestamp=1, born_host=bytes(8)
    )
    sizes = encoded.sizes.astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    data = bytearray(encoded.data)
    offsets = np.ndarray((len(data) - 7,), ">i8", data, strides=(1,))
    offsets[starts + 20] = np.arange(first, first + len(keys))
    units = np.zeros(len(keys), UNIT_DTYPE)
    records = RecordColumns(bytes(data), starts, sizes)
    return QueueBlock(TOPIC, 0, first, first + len(keys), units, records)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# -- Kafka -----------------------------------------------------------------------------------------

_NEVER_MS = 1 << 40
_CLEANED = re.compile(
    r"Log cleaner thread \d+ cleaned log " + TOPIC + r"-0.*?"
    r"processed in ([\d,.]+) seconds.*?"
    r"Start size: ([\d,.]+) MB.*?End size: ([\d,.]+) MB",
    re.DOTALL,
)


def run_kafka(load: Load, home: Path) -> Run:
    cleaner = {"log.cleaner.threads": 1, "log.cleaner.backoff.ms": 200}
    with running_kafka(home, cleaner) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.address})
        config = {
            "cleanup.policy": "compact",
            "segment.bytes": str(FILE_BYTES),
            "min.compaction.lag.ms": str(_NEVER_MS),
        }
        topic = NewTopic(TOPIC, num_partitions=1, replication_factor=1, config=config)
        admin.create_topics([topic])[TOPIC].result()
        _produce(kafka.address, load)
        # The last segment is never cleaned, so a new one must begin after the data.
        pid = kafka.broker.process.pid
        cpu = cpu_s([pid])
        config["min.compaction.lag.ms"] = "0"
        admin.alter_configs([ConfigResource(ResourceType.TOPIC, TOPIC, set_config=config)])
        found = _wait_until(lambda: _CLEANED.search(kafka.broker.log.read_text(errors="replace")))
        spent = cpu_s([pid]) - cpu
        seconds, before, after = (float(text.replace(",", "")) for text in found.groups())
        return Run("Kafka", seconds, spent, int(before * MIB), int(after * MIB))


def _produce(address: str, load: Load) -> None:
    producer = Producer(
        {"bootstrap.servers": address, "linger.ms": 50, "queue.buffering.max.messages": 100_000}
    )
    for key, body in zip(load.keys, load.bodies(), strict=False):
        while True:
            try:
                producer.produce(TOPIC, body, key)
                break
            except BufferError:
                producer.poll(0.05)
    producer.flush()


# -- Apache RocketMQ -------------------------------------------------------------------------------


_INTERVAL_S = 60
_BATCH_MESSAGES = 1000
_IDLE_SHARE = 0.3
_SAMPLE_S = 0.05


def run_rocketmq(load: Load, home: Path) -> Run:
    """Its run begins up to two intervals after the first message, and says nothing of itself.

    It reads keys before it makes new files, so its start is where its CPU was idle last before
    there were any; its end is where they have left the folder of unfinished work.
    """
    store = home / "store"
    settings = {"compactionScheduleInternal": str(_INTERVAL_S * 1000)}
    with running("apache", home, store=store, settings=settings) as peer:
        _fill_rocketmq(peer.broker, load)
        log = store / "compaction" / "compactionLog" / TOPIC / "0"
        before = _settled_bytes(log)
        if any((log / "compacting").glob("*")):
            raise PeerError("the run began while messages were sent: use a smaller --mib")
        samples: list[tuple[float, float]] = []

        def has_new_files() -> bool:
            samples.append((time.monotonic(), cpu_s([peer.broker_pid])))
            time.sleep(_SAMPLE_S)
            return any((log / "compacting").glob("*"))

        _wait_until(has_new_files)
        _wait_until(lambda: not any((log / "compacting").glob("*")) and _has_no_old_files(log))
        end_s, end_cpu_s = time.monotonic(), cpu_s([peer.broker_pid])
        start_s, start_cpu_s = _last_idle(samples)
        spent_s = end_cpu_s - start_cpu_s
        return Run("Apache RocketMQ", end_s - start_s, spent_s, before, _settled_bytes(log))


def _has_no_old_files(log: Path) -> bool:
    """Old files are first renamed, then removed; of the new and the live ones fewer are left."""
    names = [path.name for path in log.iterdir()]
    return not any(name.endswith(".delete") for name in names)


def _settled_bytes(folder: Path) -> int:
    """The size of a folder's files when they do not grow any more."""
    sizes = [-1, 0]
    while sizes[-1] != sizes[-2] or not sizes[-1]:
        time.sleep(1)
        sizes.append(_allocated_bytes(folder))
    return sizes[-1]


def _fill_rocketmq(address: str, load: Load) -> None:
    fields = {
        "topic": TOPIC,
        "defaultTopic": "TBW102",
        "readQueueNums": 1,
        "writeQueueNums": 1,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": "+cleanup.policy=COMPACTION",
    }
    bodies = load.bodies()
    with Client(address) as client:
        client.call(frame(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))
        for first in range(0, len(load.keys), _BATCH_MESSAGES):
            items = [
                (0, next(bodies), encode_properties({"KEYS": key, "UNIQ_KEY": f"{number:032X}"}))
                for number, key in enumerate(load.keys[first : first + _BATCH_MESSAGES], first)
            ]
            call_until_accepted(client, send_frame(TOPIC, 0, encode_batch(items), is_batch=True))


def _last_idle(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Where the process used little CPU last."""
    for (start_s, start_cpu_s), (end_s, end_cpu_s) in reversed([*pairwise(samples)]):
        if end_cpu_s - start_cpu_s < _IDLE_SHARE * (end_s - start_s):
            return end_s, end_cpu_s
    return samples[0]


def _allocated_bytes(folder: Path) -> int:
    """Of files that may be removed while they are counted."""
    total = 0
    for path in folder.glob("0*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


# -- all -------------------------------------------------------------------------------------------

SYSTEMS: dict[str, Callable[[Load, Path], Run]] = {
    "headrace": run_headrace,
    "kafka": run_kafka,
    "rocketmq": run_rocketmq,
}


def _wait_until(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + TIMEOUT_S
    while not (found := look()):
        if time.monotonic() > end:
            raise PeerError("the log was not compacted in time")
        time.sleep(LOOK_S)
    return found


def main(options: list[str]) -> None:
    """Print a row per system, then what compacted topics cost."""
    parser = option_parser("compaction", __doc__, [*SYSTEMS, *PARTS])
    parser.add_argument("--mib", type=int, default=1024, help="size of all bodies")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument(
        "--table-keys", type=int, default=1_000_000, help=f"for {' and '.join(PARTS)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help=f"for {' and '.join(PARTS)}")
    chosen = parse(parser, options)
    wanted = chosen.only or [*SYSTEMS, *PARTS]
    if systems := [name for name in wanted if name not in PARTS]:
        _compare(Load.of(chosen.mib, chosen.body_bytes, chosen.keys), systems)
    for part in (name for name in PARTS if name in wanted):
        with tempfile.TemporaryDirectory(prefix="headrace-topics-") as home:
            PARTS[part](Path(home), chosen.table_keys, chosen.rounds)


def _compare(load: Load, systems: list[str]) -> None:
    say = sys.stdout.write
    say(f"{len(load.keys)} messages of {load.body_bytes} B, {len(set(load.keys))} keys\n")
    for name in systems:
        home = Path(tempfile.mkdtemp(prefix="headrace-compaction-"))
        try:
            run = SYSTEMS[name](load, home)
        finally:
            shutil.rmtree(home, ignore_errors=True)
        say(
            f"{run.system:16} {run.seconds:6.2f} s {run.cpu_s:6.2f} s CPU "
            f"{run.bytes_before >> 20:6} MiB before {run.bytes_after >> 20:6} MiB after\n"
        )
        sys.stdout.flush()
