"""A compaction of more keys than its map holds: rounds, time, bytes and peak memory.

``python -m tests.bench.compaction_rounds --keys 10000000 --map-keys 1000000``
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace_broker.compaction.marker_times import MarkerTimes
from headrace_broker.compaction.queue_log import QueueLog
from headrace_broker.compaction.run import Job
from headrace_broker.compaction.segments import COMPACTING, Folders
from headrace_broker.compaction.units import FileSizes
from headrace_broker.compaction.worker import Task, run_in_process
from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.queues.queue_blocks import QueueBlock
from headrace_protocol.columns import UNIT_DTYPE, RecordColumns, encode_records
from headrace_protocol.message import encode_properties

if TYPE_CHECKING:
    from headrace_broker.compaction.run import Result
    from headrace_protocol.columns import Array

MIB = 1 << 20
TOPIC = "ROUNDS"
# What the map may take for a key.
KEY_BYTES = 32
BODY = b"b" * 32
DIGITS = 8
QUEUE_OFFSET_AT = 20
BLOCK_MESSAGES = 100_000


def fill(log: QueueLog, keys: Array) -> None:
    """Append a message for each number of a key; all records are alike but for that."""
    raw = encode_properties({"KEYS": "user-" + "0" * DIGITS, "WAIT": "true"})
    made = encode_records(TOPIC, [BODY], [raw], born_timestamp=1, born_host=bytes(8))
    record = np.frombuffer(made.data, np.uint8)
    key_at = bytes(made.data).index(b"user-") + len("user-")
    powers = 10 ** np.arange(DIGITS - 1, -1, -1)
    for first in range(0, len(keys), BLOCK_MESSAGES):
        part = keys[first : first + BLOCK_MESSAGES]
        rows = np.tile(record, (len(part), 1))
        rows[:, key_at : key_at + DIGITS] = part[:, np.newaxis] // powers % 10 + ord("0")
        offsets = np.arange(first, first + len(part)).astype(">i8")
        rows[:, QUEUE_OFFSET_AT : QUEUE_OFFSET_AT + 8] = offsets.view(np.uint8).reshape(-1, 8)
        sizes = np.full(len(part), len(record), np.int64)
        records = RecordColumns(rows.tobytes(), np.cumsum(sizes) - sizes, sizes)
        units = np.zeros(len(part), UNIT_DTYPE)
        log.append(QueueBlock(TOPIC, 0, first, first + len(part), units, records))
    log.roll()
    log.sync()


class PeakMemory:
    """The most memory that a run's process has had.

    Its own figure at the end would be that of this process, if that had more when it started it.
    """

    def __init__(self) -> None:
        self.kib = 0

    def look(self, _byte_count: int) -> None:
        """Called before each read and write of the run."""
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for line in Path(f"/proc/{child}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    self.kib = max(self.kib, int(line.split()[1]))


def compact(home: Path, keys: Array, map_bytes: int, memory: PeakMemory) -> tuple[Result, int]:
    """The result of one run over all messages, and the bytes of all messages before."""
    folders, sizes, fs = Folders.of(home, TOPIC, 0), FileSizes.of(100 * MIB, 10 * MIB), Files()
    log = QueueLog(folders, sizes, fs)
    fill(log, keys)
    below = folders.below(COMPACTING)
    task = Task(
        folders.texts,
        below.texts,
        sizes,
        [(segment.base, segment.count) for segment in log.segments],
        Job(0, 1, 1, 0, MarkerTimes([], []), map_bytes),
    )
    result = run_in_process(task, memory.look)
    return result, sum(segment.log_end for segment in log.segments)


def main() -> None:
    """Print what the run did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--map-keys", type=int, default=1_000_000)
    chosen = parser.parse_args()
    rng = np.random.default_rng(1)
    again = rng.integers(0, chosen.keys, chosen.keys // 10)
    keys = np.concatenate([rng.permutation(chosen.keys), again])
    start_s, memory = time.perf_counter(), PeakMemory()
    with tempfile.TemporaryDirectory(prefix="headrace-rounds-") as home:
        result, bytes_before = compact(Path(home), keys, chosen.map_keys * KEY_BYTES, memory)
    assert result.kept_count == chosen.keys, result
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stdout.write(
        f"{len(keys)} messages of {chosen.keys} keys, {bytes_before / MIB:.0f} MiB\n"
        f"map {result.map_bytes / MIB:.0f} MiB, rounds {result.round_count}\n"
        f"read {result.bytes_read / MIB:.0f} MiB, written {result.bytes_written / MIB:.0f} MiB\n"
        f"CPU {used.ru_utime + used.ru_stime:.1f} s, peak memory {memory.kib / 1024:.0f} MiB\n"
        f"all with filling {time.perf_counter() - start_s:.0f} s\n"
    )


if __name__ == "__main__":
    main()
