"""Places, brokers and bare loops for the benchmark of tiered storage."""

from __future__ import annotations

import operator
import os
import random
import re
import socket
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import blocking
from headrace_broker.tiered.driver.interface import Failure
from headrace_broker.tiered.driver.objects import open_objects
from headrace_broker.tiered.driver.posix import PosixDriver
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.bench.processes import cpu_s
from tests.bench.wire import QUEUES, SUBSCRIPTION, Refused, frame
from tests.bench.wire_headers import HeaderClient
from tests.conformance.peer import running
from tests.support.object_server import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from headrace_broker.tiered.driver.object_place import ObjectPlace
    from tests.conformance.peer import Peer

TOPIC = "HISTORY"
BODY_BYTES = 1024
# Of one group of messages of a queue, and of their units.
PIECE_BYTES, UNITS_BYTES = 4 << 20, 72 << 10
OBJECT_BYTES = 16 << 20
SAMPLE_S = 0.01
UPLOAD_TIMEOUT_S = 600
CONTINUES = (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY)


@dataclass(frozen=True)
class Place:
    """Where messages are kept. settings: the broker's. folder: what is in it, as files."""

    settings: dict[str, str]
    folder: Path
    objects: ObjectPlace | None = None

    @property
    def kept_bytes(self) -> int:
        """What is stored there."""
        return sum(size for _, size in self.files())

    def files(self) -> list[tuple[Path, int]]:
        """All files and their sizes."""
        found = []
        for path in self.folder.rglob("*"):
            try:
                found.append((path, path.stat().st_size if path.is_file() else 0))
            except FileNotFoundError:  # merged or replaced since
                continue
        return [(path, size) for path, size in found if size]

    def drop_cached(self) -> None:
        """Let the system forget what it holds of it in memory."""
        for path, _ in self.files():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_bare(self, range_bytes: int) -> None:
        """Read all records once, by the driver alone, so many bytes at a time."""
        if self.objects is not None:
            driver: Any = open_objects(self.objects)
            entries = [entry for entry in driver.entries("") if "/data/" in entry.path]
        else:
            driver = PosixDriver(self.folder)
            entries = [entry for entry in driver.entries("") if "_LOG/" in entry.path]
        for path, size in entries:
            for start in range(0, size, range_bytes):
                read = driver.read(path, [(start, min(start + range_bytes, size))])
                assert not isinstance(read, Failure), read

    def write_bare(self, byte_count: int, prefix: str) -> None:
        """Write as many bytes as an upload of that many, by the driver alone."""
        data = random.Random(1).randbytes(OBJECT_BYTES)
        if self.objects is not None:
            objects = open_objects(self.objects._replace(prefix=prefix))
            for number in range(max(byte_count // OBJECT_BYTES, 1)):
                for name, body in ((f"data/{number}", data), (f"manifest/{number}", data[:4096])):
                    assert isinstance(objects.put(name, body), str)
            return
        driver = PosixDriver(self.folder / prefix)
        for number in range(max(byte_count // PIECE_BYTES, 1)):
            queue, turn = number % QUEUES, number // QUEUES
            for kind, size in (("COMMIT_LOG", PIECE_BYTES), ("CONSUME_QUEUE", UNITS_BYTES)):
                failure = driver.append(f"{queue}/{kind}/0", turn * size, data[:size])
                assert failure is None, failure


_ALL = {"messageStorePlugIn": "tieredstore", "tieredStorageLevel": "FORCE"}


@contextmanager
def folder_place(directory: Path) -> Iterator[Place]:
    """A folder with Apache's layout."""
    folder = directory / "tier"
    folder.mkdir()
    more = {"tieredBackendServiceProvider": "posix", "tieredStoreFilePath": str(folder)}
    yield Place({**_ALL, **more}, folder)


@contextmanager
def server_place(directory: Path) -> Iterator[Place]:
    """A bucket of a real S3 server on this machine."""
    folder = directory / "s3"
    folder.mkdir()
    with serving(folder) as place:
        yield in_bucket(folder, place)


def in_bucket(folder: Path, place: ObjectPlace) -> Place:
    """A bucket of a server on a folder."""
    more = {
        "tieredBackendServiceProvider": "s3",
        "objectStoreEndpoint": place.endpoint,
        "objectStoreBucket": place.bucket,
        "objectStoreAccessKey": place.access_key,
        "objectStoreSecretKey": place.secret_key,
    }
    return Place({**_ALL, **more}, folder / "objects", place)


PLACES = {"folder": folder_place, "S3": server_place}


# -- brokers ---------------------------------------------------------------------------------------


@contextmanager
def broker(
    directory: Path, store: Path, settings: Mapping[str, str], *, commit_ms: int = 1000
) -> Iterator[tuple[Peer, Callable[[], dict[str, float]]]]:
    """A broker on a store that stays, and a function that returns its metrics' sums by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    more = {"monitorPort": str(port), "tieredStoreGroupCommitTimeout": str(commit_ms)}
    with running("headrace", directory, store=store, settings={**settings, **more}) as peer:
        yield peer, lambda: metrics(port)
        peer.daemons["broker"].stop()


_SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? ([-+0-9.e]+)$", re.MULTILINE)


def metrics(port: int) -> dict[str, float]:
    """The metrics of a broker, summed over all labels but ``operation``; of ages, the largest."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        operation = re.search(r'operation="(\w+)"', labels)
        key = f"{name}.{operation[1]}" if operation else name
        join = max if name.endswith("_dispatch_latency") else operator.add
        sums[key] = join(sums.get(key, 0), float(value))
    return sums


def fill(peer: Peer, byte_count: int) -> int:
    """Send so many bytes of bodies that nothing can compress; returns how many messages."""
    bodies = [os.urandom(BODY_BYTES) for _ in range(4000)]
    calls = byte_count // BODY_BYTES // len(bodies)
    with blocking.Admin(nameserver=peer.nameserver) as admin:
        admin.create_topic(TOPIC, queues=QUEUES)
    with blocking.Producer(nameserver=peer.nameserver) as producer:
        for _ in range(calls):
            producer.send_many(bodies, topic=TOPIC)
    return calls * len(bodies)


class Cost(NamedTuple):
    """Of some work: bytes, seconds, and CPU seconds."""

    byte_count: int
    seconds: float
    cpu_s: float


def cost_of_upload(place: Place, pid: int, byte_count: int) -> Cost:
    """From the first bytes in the place until nine tenths of so many are there."""
    first: tuple[float, float, int] | None = None
    deadline = time.monotonic() + UPLOAD_TIMEOUT_S
    while True:
        assert time.monotonic() < deadline, "the upload does not end"
        now = time.monotonic(), cpu_s([pid]), place.kept_bytes
        if first is None and now[2] > OBJECT_BYTES:
            first = now
        if first is not None and now[2] > 0.9 * byte_count:
            seconds, cpu, moved = (end - begin for begin, end in zip(first, now, strict=True))
            return Cost(int(moved), seconds, cpu)
        time.sleep(SAMPLE_S)


def cost_here(work: Callable[[], object], byte_count: int) -> Cost:
    """Of work of this process."""
    began, cpu = time.monotonic(), time.process_time()
    work()
    return Cost(byte_count, time.monotonic() - began, time.process_time() - cpu)


def bulk_pull_frame(queue: int, offset: int, bytes_max: int, tag: str = "*") -> bytes:
    """A bulk pull as headrace's clients send it."""
    fields = {
        "consumerGroup": "bench",
        "topic": TOPIC,
        "queueId": queue,
        "queueOffset": offset,
        "maxMsgNums": 4096,
        "maxMsgBytes": bytes_max,
        "sysFlag": SUBSCRIPTION,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": tag,
        "expressionType": "TAG",
    }
    return frame(RequestCode.BULK_PULL, fields, opaque=queue)


def drain(address: str, bytes_max: int = PIECE_BYTES, tag: str = "*") -> int:
    """Read all queues by bulk pulls, one of each under way; returns how many were answered."""
    count, unread = 0, QUEUES
    with HeaderClient(address) as client:
        for queue in range(QUEUES):
            client.send(bulk_pull_frame(queue, 0, bytes_max, tag))
        while unread:
            header = client.answer()
            if header["code"] not in CONTINUES:
                raise Refused(header)
            count += 1
            queue, fields = header["opaque"], header["extFields"]
            offset = int(fields["nextBeginOffset"])
            if offset < int(fields["maxOffset"]):
                client.send(bulk_pull_frame(queue, offset, bytes_max, tag))
            else:
                unread -= 1
    return count
