"""Seconds that a broker takes to start on a large store, and to stop: python -m tests.bench.start.

One store is 100 GiB of 1 KiB records in 100 queues. Of the log only what a start looks at is there:
the first record of each file, and the last file; the rest are holes. The queues are whole (2.1 GB).
Before each cold start the kernel is asked to forget what it keeps of the files.

Other stores have a tail of the log that nothing derived from it has on disk: 1 GiB of messages, and
200 MiB each of delayed messages, timers, transactions and a staged batch with their deliveries.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import trio

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.integrity.checkpoint import Checkpoint, IndexMark
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.settings import StoreSettings
from headrace_protocol.blocks import encode_records
from headrace_protocol.columns import HEAD, UNIT_DTYPE
from headrace_protocol.message import BLANK_RECORD, MAGIC_BLANK, encode_record
from headrace_protocol.message_ids import encode_host
from tests.bench.processes import cpu_s
from tests.bench.start_tails import TAILS, make_tail
from tests.conformance.peer import HOST, free_ports

GIB = 1 << 30
RECORD_BYTES = 1024
PER_FILE = GIB // RECORD_BYTES - 1
QUEUES = 100
TOPIC = "Large"
START_MS = 1_700_000_000_000
QUEUE_FILE_UNITS = 300_000


# -- the store -------------------------------------------------------------------------------------


def make_store(root: Path, file_count: int) -> None:
    """Records in turn to all queues; the last file is whole."""
    (root / "commitlog").mkdir(parents=True)
    for number in range(file_count):
        with (root / "commitlog" / f"{number * GIB:020d}").open("xb") as file:
            file.truncate(GIB)
            file.write(_records(number, 1 if number < file_count - 1 else PER_FILE))
    with (root / "commitlog" / f"{(file_count - 1) * GIB:020d}").open("r+b") as file:
        file.seek(PER_FILE * RECORD_BYTES)
        file.write(BLANK_RECORD.pack(RECORD_BYTES, MAGIC_BLANK))
    _write_queues(root, file_count)
    newest = _physical_offset(np.array([file_count * PER_FILE - 1]))
    saved = Checkpoint(START_MS, START_MS, 0, 0, 0, int(newest[0]))
    saved.save(root / "checkpoint", Files())
    _save_mark(root, int(newest[0]))


def _save_mark(root: Path, last_seen: int) -> None:
    """Note how far the index is; no record has a key."""
    IndexMark.file(root, Files()).save(IndexMark("", 0, 0, last_seen))


def _physical_offset(number: np.ndarray) -> np.ndarray:
    return number // PER_FILE * GIB + number % PER_FILE * RECORD_BYTES


def _records(file_number: int, count: int) -> bytes:
    whole = encode_record(
        topic=TOPIC,
        queue_id=0,
        body=bytes(RECORD_BYTES - 91 - len(TOPIC)),
        properties=b"",
        store_timestamp=START_MS,
        born_host=encode_host(HOST, 1),
    )
    assert len(whole) == RECORD_BYTES
    records = np.frombuffer(bytearray(whole) * count, np.uint8).reshape(count, RECORD_BYTES)
    heads = np.ndarray(count, HEAD, records, strides=(RECORD_BYTES,))
    numbers = file_number * PER_FILE + np.arange(count)
    heads["queue_id"], heads["queue_offset"] = numbers % QUEUES, numbers // QUEUES
    heads["physical_offset"] = _physical_offset(numbers)
    return records.tobytes()


def _write_queues(root: Path, file_count: int) -> None:
    numbers = np.arange(file_count * PER_FILE)
    for queue_id in range(QUEUES):
        offsets = _physical_offset(numbers[queue_id::QUEUES])
        units = np.zeros(len(offsets), UNIT_DTYPE)
        units["physical_offset"], units["size"] = offsets, RECORD_BYTES
        folder = root / "consumequeue" / TOPIC / str(queue_id)
        folder.mkdir(parents=True)
        for first in range(0, len(units), QUEUE_FILE_UNITS):
            with (folder / f"{first * UNIT_DTYPE.itemsize:020d}").open("xb") as file:
                file.write(units[first : first + QUEUE_FILE_UNITS].tobytes())
                file.truncate(QUEUE_FILE_UNITS * UNIT_DTYPE.itemsize)


# -- starts ----------------------------------------------------------------------------------------


def start_s(root: Path, log: Path) -> tuple[float, float]:
    """From the process's start until it takes messages, and its CPU by then; it is killed."""
    port = free_ports(2)
    settings = root.parent / "broker.conf"
    settings.write_text(
        f"brokerName=b\nbindAddress={HOST}\nlistenPort={port}\nmonitorPort={port + 1}\n"
        "fastListenPort=0\n"
        f"storePathRootDir={root}\nfileReservedTime=100000\n"
    )
    command = [str(Path(sys.executable).with_name("headrace")), "broker", "-c", str(settings)]
    started = time.monotonic()
    with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
        while not _is_ready(port + 1):
            assert process.poll() is None, log.read_text()
            time.sleep(0.005)
        taken_s, cpu = time.monotonic() - started, cpu_s([process.pid])
        process.kill()
    return taken_s, cpu


def _is_ready(port: int) -> bool:
    with suppress(OSError):
        connection = http.client.HTTPConnection(HOST, port, timeout=1)
        connection.request("GET", "/ready")
        return bool(json.load(connection.getresponse())["state"] == "serving")
    return False


def forget(root: Path) -> None:
    """Have the kernel drop the files' pages."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def starts(root: Path, last_file: int) -> Iterator[tuple[str, float, float]]:
    """After a clean stop; killed with all on disk; killed with the last file yet to be read."""
    log, abort = root.parent / "broker.log", root / "abort"
    whole = (root / "checkpoint").read_bytes()
    newest = Checkpoint.load(root / "checkpoint").logics_physical_offset
    behind = Checkpoint(START_MS, START_MS, 0, 0, 0, last_file * GIB)
    for name, is_clean, is_behind in (
        ("after a clean stop", True, False),
        ("after a kill, all flushed", False, False),
        ("after a kill, 1 GiB to read", False, True),
    ):
        for is_cold in (True, False):
            abort.unlink(missing_ok=True) if is_clean else abort.touch()
            (root / "checkpoint").write_bytes(whole)
            _save_mark(root, newest)
            if is_behind:
                behind.save(root / "checkpoint", Files())
                _save_mark(root, last_file * GIB)
            if is_cold:
                forget(root)
            yield f"start {name}, {'cold' if is_cold else 'cached'}", *start_s(root, log)


# -- stops -----------------------------------------------------------------------------------------


async def stop_s(root: Path, gib: float, *, is_daemon: bool) -> float:
    """Seconds that a stop takes once so much was written."""
    store = MessageStore(StoreSettings(root=root))
    store.use_threads = is_daemon
    store.load()
    queue = store.queue(TOPIC, 0)
    bodies = [bytes(RECORD_BYTES)] * 1000
    body = encode_records(TOPIC, bodies, b"", born_timestamp=1, born_host=encode_host(HOST, 1)).body
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        while store.commit_log.max_offset < gib * GIB:
            store.write_path.append_records(EncodedRecords(queue, len(bodies), body))
            store.write_path.publish()
            await trio.lowlevel.checkpoint()
        store.index_tick()
        await store.flusher.flush_thoroughly()
        nursery.cancel_scope.cancel()
    started = time.monotonic()
    store.close()
    return time.monotonic() - started


def main() -> None:
    """Print seconds; arguments: files of the log (100), GiB written before a stop (5)."""
    files, gib = (int(text) for text in (*sys.argv[1:], *("100", "5")[len(sys.argv) - 1 :]))
    folder = Path(tempfile.mkdtemp(prefix="headrace-start-"))
    try:
        make_store(folder / "store", files)
        for name, seconds, cpu in starts(folder / "store", files - 1):
            sys.stdout.write(f"{name:44}{seconds:8.2f} s{cpu:8.2f} s CPU\n")
        shutil.rmtree(folder / "store")
        for kind, mib in TAILS.items():
            make_tail(folder / kind, kind, mib)
            name = f"start after a kill, {mib} MiB, {kind}"
            seconds, cpu = start_s(folder / kind, folder / "broker.log")
            sys.stdout.write(f"{name:44}{seconds:8.2f} s{cpu:8.2f} s CPU\n")
            shutil.rmtree(folder / kind)
        for is_daemon in (False, True):
            seconds = trio.run(lambda: stop_s(folder / "store", gib, is_daemon=is_daemon))  # noqa: B023
            how = "sealed on the way" if is_daemon else "sealed at the stop"
            sys.stdout.write(f"{f'stop after {gib} GiB, {how}':44}{seconds:8.2f} s\n")
            shutil.rmtree(folder / "store")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
