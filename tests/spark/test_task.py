"""Reads of a range by a task: from a real broker, and over a line that breaks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

import headrace
from headrace.spark.body.format import body_format
from headrace.spark.errors import DataLoss, SparkConnectorError
from headrace.spark.plan.filters import Predicates, Span
from headrace.spark.plan.tasks import QueueRange, ReadPlan
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.schema import source_schema
from headrace.spark.read.task import read_range
from headrace.spark.retry import AT_ONCE, Patience
from headrace_protocol.blocks import encode_records, encode_uniform
from headrace_protocol.compression import COMPRESSED, COMPRESSION_ZLIB
from headrace_protocol.drivers.blocking import BlockingConnection
from headrace_protocol.message import encode_properties
from headrace_protocol.message_ids import encode_host
from tests.support.bulk import store_block

COUNT = 5000
HOST = encode_host("10.0.0.9", 4711)
SCHEMA = arrow_schema(source_schema())
# Two tags of one hash code.
TAGS = ("Aa", "BB", "other")


def only(*names: str) -> pa.Schema:
    return pa.schema([SCHEMA.field(name) for name in names])


VALUES = only("value")


def rows(plan: ReadPlan, part: QueueRange, schema: pa.Schema = SCHEMA) -> list[dict[str, Any]]:
    return pa.Table.from_batches(read_range(plan, part, schema), schema).to_pylist()


def numbers(plan: ReadPlan, part: QueueRange) -> list[int]:
    batches = read_range(plan, part, VALUES)
    return [int(body) for batch in batches for body in batch["value"].to_pylist()]


@pytest.fixture(scope="module")
def mq() -> Iterator[Any]:
    with headrace.embedded() as running:
        yield running


@pytest.fixture(scope="module")
def part(mq: Any) -> QueueRange:
    """A queue of messages with keys of their own and tags in turn."""
    raws = [
        encode_properties({"KEYS": f"order-{n} all", "TAGS": TAGS[n % 3], "n": str(n)})
        for n in range(COUNT)
    ]
    bodies = [b"%d" % number for number in range(COUNT)]
    block = encode_records("T", bodies, raws, born_timestamp=range(COUNT), born_host=HOST)
    store_block(mq.broker, "T", block)
    return QueueRange("T", "broker-a", mq.broker, 0, 0, COUNT)


@pytest.fixture(params=["bulk", "pull"])
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ReadPlan:
    """Plans of a read from a broker of ours, and from one of another kind."""
    if request.param == "pull":
        monkeypatch.setattr(BlockingConnection, "peer_is_headrace", False)
    return ReadPlan(slice_bytes=128 * 1024)


def test_every_column_of_every_message(plan: ReadPlan, part: QueueRange) -> None:
    found = pa.Table.from_batches(read_range(plan, part, SCHEMA), SCHEMA)
    found.validate(full=True)
    assert found["queue_offset"].to_pylist() == list(range(COUNT))
    some = range(0, COUNT, 97)
    for number, row in zip(some, found.take(list(some)).to_pylist(), strict=True):
        assert row["value"] == b"%d" % number
        assert (row["topic"], row["broker"], row["queue"]) == ("T", "broker-a", 0)
        assert (row["keys"], row["tags"]) == (f"order-{number} all", TAGS[number % 3])
        assert dict(row["properties"])["n"] == str(number)
        assert row["born_timestamp"].timestamp() == pytest.approx(number / 1000)
        assert row["born_host"] == "10.0.0.9:4711"
        assert int(row["message_id"][16:], 16) == row["physical_offset"]


@pytest.mark.parametrize(("start", "end"), [(0, 1), (7, 2001), (COUNT - 1, COUNT), (5, 5)])
def test_a_range_and_nothing_else(plan: ReadPlan, part: QueueRange, start: int, end: int) -> None:
    its_part = replace(part, start_offset=start, end_offset=end)
    assert numbers(plan, its_part) == list(range(start, end))


def test_batches_are_small(plan: ReadPlan, part: QueueRange) -> None:
    sizes = [len(batch) for batch in read_range(replace(plan, rows_max=100), part, VALUES)]
    assert sum(sizes) == COUNT
    assert max(sizes) == 100


def nothing(_: int) -> bool:
    return False


def everything(_: int) -> bool:
    return True


# --- filters -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicates", "tags", "wanted"),
    [
        (Predicates(tags=frozenset({"Aa"})), "*", lambda n: n % 3 == 0),
        (None, "BB", lambda n: n % 3 == 1),
        (Predicates(tags=frozenset({"Aa", "BB"})), "BB || other", lambda n: n % 3 == 1),
        (Predicates(tags=frozenset({"a || b", "*"})), "*", nothing),
        (Predicates(tags=frozenset()), "*", nothing),
        (Predicates(queue_offsets=Span(10, 30)), "*", lambda n: 10 <= n < 30),
        (Predicates(queue_offsets=Span(COUNT + 1)), "*", nothing),
        (Predicates(queues=frozenset({1, 2})), "*", nothing),
        (Predicates(queues=frozenset({0, 2})), "*", everything),
        (Predicates(store_ms=Span(1)), "*", everything),
        (Predicates(store_ms=Span(None, 1)), "*", nothing),
        (Predicates(keys=frozenset({"order-7 all", "order-8"})), "*", lambda n: n == 7),
    ],
)
def test_filters_are_exact(
    plan: ReadPlan, part: QueueRange, predicates: Predicates | None, tags: str, wanted: Any
) -> None:
    found = numbers(replace(plan, predicates=predicates, tags=tags), part)
    assert found == [number for number in range(COUNT) if wanted(number)]


def test_store_times_within_a_range(part: QueueRange) -> None:
    first = rows(ReadPlan(), part, only("store_timestamp"))[0]["store_timestamp"]
    first_ms = round(first.timestamp() * 1000)
    inside = Predicates(store_ms=Span(first_ms, first_ms + 1))
    assert numbers(ReadPlan(predicates=inside), part) == list(range(COUNT))
    assert numbers(ReadPlan(predicates=Predicates(store_ms=Span(first_ms + 1))), part) == []


def test_keys_are_looked_up(part: QueueRange) -> None:
    # A read of the range misses its end.
    part = replace(part, end_offset=COUNT + 1)
    keys = Predicates(keys=frozenset({"order-4321 all", "order-7 all"}))
    assert numbers(ReadPlan(predicates=keys), part) == [7, 4321]
    its_part = replace(part, start_offset=100)
    assert numbers(ReadPlan(predicates=keys), its_part) == [4321]
    nobody = Predicates(keys=frozenset({"nobody"}))
    assert numbers(ReadPlan(predicates=nobody), part) == []
    with pytest.raises(DataLoss):
        numbers(ReadPlan(predicates=Predicates(keys=frozenset({"all"}))), part)  # 5000 have it


# --- what is missing -----------------------------------------------------------------------


def test_lost_messages_are_an_error(plan: ReadPlan, part: QueueRange) -> None:
    beyond = replace(part, start_offset=COUNT - 3, end_offset=COUNT + 9)
    with pytest.raises(DataLoss, match=rf"T/broker-a/0 no longer has a message at offset {COUNT}"):
        numbers(plan, beyond)


def test_lost_messages_are_skipped_and_logged(
    plan: ReadPlan, part: QueueRange, caplog: pytest.LogCaptureFixture
) -> None:
    beyond = replace(part, start_offset=COUNT - 3, end_offset=COUNT + 9)
    with caplog.at_level(logging.WARNING):
        found = numbers(replace(plan, fail_on_data_loss=False), beyond)
    assert found == [COUNT - 3, COUNT - 2, COUNT - 1]
    assert "skipped 9 lost messages" in caplog.text


def test_nobody_is_there(part: QueueRange) -> None:
    with pytest.raises(headrace.HeadraceError, match=r"cannot connect to 127\.0\.0\.1:1:"):
        numbers(ReadPlan(patience=AT_ONCE), replace(part, address="127.0.0.1:1"))


@contextlib.contextmanager
def breaking_line(address: str, bytes_max: int) -> Iterator[tuple[str, list[socket.socket]]]:
    """An address where each connection leads to another one and ends after so many bytes.

    Yields it, and a list that the connections are added to.
    """
    host, port = address.rsplit(":", 1)
    clients: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, sink: socket.socket, rest: int) -> None:
            with contextlib.suppress(OSError):
                while rest > 0 and (data := source.recv(min(rest, 8192))):
                    sink.sendall(data)
                    rest -= len(data)
            for each in (source, sink):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    clients.append(client)
                    with client, socket.create_connection((host, int(port))) as broker:
                        forth = threading.Thread(target=carry, args=(client, broker, 1 << 30))
                        forth.start()
                        carry(broker, client, bytes_max)
                        forth.join()

        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", clients
        listener.shutdown(socket.SHUT_RDWR)
    server.join()


def test_a_line_that_breaks_again_and_again(plan: ReadPlan, part: QueueRange) -> None:
    plan = replace(plan, patience=Patience(30, 0.001))
    with breaking_line(part.address, 600_000) as (address, clients):
        assert numbers(plan, replace(part, address=address)) == list(range(COUNT))
        assert len(clients) > 1


# --- bodies --------------------------------------------------------------------------------


def test_compressed_bodies(mq: Any) -> None:
    bodies = [bytes([number]) * 100_000 for number in range(20)]
    stored = [zlib.compress(body) if n % 2 else body for n, body in enumerate(bodies)]
    flags = [COMPRESSED | COMPRESSION_ZLIB if n % 2 else 0 for n in range(20)]
    block = encode_records("Z", stored, b"", born_timestamp=0, born_host=HOST, sys_flag=flags)
    store_block(mq.broker, "Z", block)
    its_part = QueueRange("Z", "broker-a", mq.broker, 0, 0, 20)
    schema = only("queue_offset", "value")
    batches = list(read_range(ReadPlan(slice_bytes=500_000), its_part, schema))
    assert [row["value"] for batch in batches for row in batch.to_pylist()] == bodies
    # Nobody knows beforehand how large they become, and yet no batch is much larger than a slice.
    assert max(batch.nbytes for batch in batches) < 700_000


def test_a_body_that_cannot_be_decompressed(mq: Any) -> None:
    flag = COMPRESSED | COMPRESSION_ZLIB
    block = encode_records("Broken", [b"x"], b"", born_timestamp=0, born_host=HOST, sys_flag=flag)
    store_block(mq.broker, "Broken", block)
    with pytest.raises(SparkConnectorError, match="the body at Broken/broker-a/0@0 cannot be"):
        rows(ReadPlan(), QueueRange("Broken", "broker-a", mq.broker, 0, 0, 1))


def test_bodies_as_columns(mq: Any) -> None:
    bodies = [json.dumps({"id": n, "queue": str(n)}).encode() for n in range(100)]
    bodies[50] = b"no JSON"
    store_block(mq.broker, "J", encode_records("J", bodies, b"", born_timestamp=0, born_host=HOST))
    body = body_format("id long not null, queue string", "json")
    whole = source_schema(body)
    wanted = StructType([whole[name] for name in ("id", "_queue", "_corrupt", "queue")])
    found = rows(
        ReadPlan(body=body),
        QueueRange("J", "broker-a", mq.broker, 0, 0, 100),
        arrow_schema(wanted, body),
    )
    assert found[7] == {"id": 7, "_queue": 0, "_corrupt": None, "queue": "7"}
    assert found[50]["id"] is None
    assert "malformed" in found[50]["_corrupt"]
    assert [row["id"] for row in found if row["id"] is not None] == [*range(50), *range(51, 100)]


# --- memory --------------------------------------------------------------------------------

_CHILD = """
import re, sys
from headrace.spark.read.columns import arrow_schema
from headrace.spark.read.schema import source_schema
from headrace.spark.plan.tasks import QueueRange, ReadPlan
from headrace.spark.read.task import read_range

address, end = sys.argv[1], int(sys.argv[2])
count = 0
for batch in read_range(ReadPlan(), QueueRange("Big", "b", address, 0, 0, end),
                        arrow_schema(source_schema())):
    count += len(batch)
assert count == end, count
assert not {"trio", "anyio", "headrace_broker"} & set(sys.modules), sorted(sys.modules)
# The process's own peak; that of getrusage begins with the parent's.
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


def peak_mb(address: str, end: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, address, str(end)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) // 1024


@pytest.mark.slow
def test_memory_is_bounded_by_the_slice_whatever_the_range(mq: Any) -> None:
    values = np.frombuffer(os.urandom(1000 * 1024), np.uint8).reshape(1000, 1024)
    block = encode_uniform("Big", values, b"TAGS\x01a\x02", born_timestamp=0, born_host=HOST)
    for _ in range(100):
        store_block(mq.broker, "Big", block)
    small_mb, large_mb = peak_mb(mq.broker, 20_000), peak_mb(mq.broker, 100_000)
    assert large_mb < small_mb + 20  # of 80 MB more
    assert large_mb < 300
