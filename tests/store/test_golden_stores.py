"""The store directories of a real Apache RocketMQ, read and written by ours."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.store.integrity.checkpoint import Checkpoint
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store.store_queue import StoreQueue
from headrace_broker.store.store_source import EmptySource, GetStatus
from headrace_protocol.columns import RecordColumns
from headrace_protocol.inner_batch import unwrap
from headrace_protocol.message import INNER_BATCH, MAGIC_BLANK, StoredMessage, decode_record
from headrace_protocol.message_ids import decode_host
from tests.support.golden import (
    STORES,
    copy_golden_store,
    golden_settings,
    golden_store,
    manifest,
)
from tests.support.stores import FaultyFiles, query_index

# Compaction and logic queues are read through their own ways.
OTHER_WAY = {"G_COMPACT", "G_STATIC"}
# What the official client reports about a message of an inner batch is not from its record.
OF_RECORD = {"storeSize", "offsetMsgId", "bodyCrc", "sysFlag"}


def log_records(name: str) -> Iterator[tuple[bytes, StoredMessage]]:
    for path in sorted((golden_store(name) / "commitlog").iterdir()):
        data = path.read_bytes()
        position = 0
        while True:
            size, magic = struct.unpack_from(">ii", data, position)
            if size == 0 or magic == MAGIC_BLANK:
                break
            yield data[position : position + size], decode_record(data, position)
            position += size


def consume_queue_units(root: Path) -> dict[str, bytes]:
    """The units of each queue, without the zeros after them."""
    queues = {}
    for folder in sorted(root.glob("*consumequeue/*/*")):
        unit_bytes = 46 if folder.parts[-3] == "batchconsumequeue" else 20
        data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
        units = [data[at : at + unit_bytes] for at in range(0, len(data), unit_bytes)]
        queues["/".join(folder.parts[-2:])] = b"".join(unit for unit in units if any(unit))
    return queues


def index_files(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "index").iterdir())]


@pytest.fixture(params=STORES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(name: str, tmp_path: Path) -> MessageStore:
    root = copy_golden_store(name, tmp_path / "store")
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    store.load()
    return store


def drain(store: MessageStore, queue: StoreQueue) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    offset = store.source(queue).min_offset()
    while (result := store.source(queue).get(offset, 32, 1 << 18, None)).status is GetStatus.FOUND:
        columns = unwrap(RecordColumns.from_records(b"".join(result.buffers)))
        found = [columns.message(number) for number in range(len(columns))]
        assert len(found) == result.count
        assert [m.queue_offset for m in found] == list(range(offset, result.next_offset))
        messages += found
        offset = result.next_offset
    assert result.status in {GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.NO_MESSAGE_IN_QUEUE}
    return messages


def test_every_record_decodes_and_encodes_back(name: str) -> None:
    count = 0
    for raw, message in log_records(name):
        assert message.encode() == raw
        assert len(message.body) >= 1
        count += 1
    assert count == {"clean": 477, "kill9": 805}[name]


def as_manifest(message: StoredMessage) -> dict[str, Any]:
    host = "/{}:{}"
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "storeSize": message.size,
        "msgId": message.message_id,
        "offsetMsgId": message.offset_message_id,
        "bodyLength": len(message.body),
        "bodySha256": hashlib.sha256(message.body).hexdigest(),
        "bodyCrc": message.body_crc,
        "flag": message.flag,
        "sysFlag": message.sys_flag & ~1,
        "bornTimestamp": message.born_timestamp,
        "bornHost": host.format(*decode_host(message.born_host)),
        "storeTimestamp": message.store_timestamp,
        "storeHost": host.format(*decode_host(message.store_host)),
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "properties": message.properties,
    }


def test_every_message_of_the_manifest_is_there(name: str, opened: MessageStore) -> None:
    found: dict[tuple[str, int, int], StoredMessage] = {}
    for queue in opened.queues:
        for message in drain(opened, queue):
            found[message.topic, message.queue_id, message.queue_offset] = message
    count = 0
    for wanted in manifest(name)["messages"]:
        if wanted["topic"] in OTHER_WAY:
            continue
        message = found[wanted["topic"], wanted["queueId"], wanted["queueOffset"]]
        seen = as_manifest(message)
        if wanted["sysFlag"] & INNER_BATCH:
            seen = {key: value for key, value in seen.items() if key not in OF_RECORD}
        assert {key: wanted[key] for key in seen} == seen
        count += 1
    assert count > 300


def test_queue_bounds_are_those_of_the_manifest(name: str, opened: MessageStore) -> None:
    growing = {"RMQ_SYS_TRANS_OP_HALF_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"}
    growing |= {"TRANS_CHECK_MAX_TIME_TOPIC", "SCHEDULE_TOPIC_XXXX", "G_STREAM"}
    for path, bounds in manifest(name)["queues"].items():
        topic, _, queue_id = path.split("/")
        if topic in OTHER_WAY or topic in growing:
            continue
        queue = opened.find_queue(topic, int(queue_id))
        source = opened.source(queue) if queue else EmptySource()
        seen = source.min_offset(), source.max_offset()
        assert seen == (bounds["min"], bounds["max"]), path


def test_every_index_query_of_the_manifest_answers(name: str, opened: MessageStore) -> None:
    for question, physical_offsets in manifest(name)["indexQueries"].items():
        topic, key = question.split("#", 1)
        found = query_index(opened, topic, key, 64, 0, 1 << 62)
        # mqadmin's own text stands for "no message".
        wanted = {offset for offset in physical_offsets if isinstance(offset, int)}
        assert sorted(found) == sorted(wanted), question


def test_a_clean_store_is_left_as_it_was(tmp_path: Path) -> None:
    root = copy_golden_store("clean", tmp_path / "store")
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    assert store.load().is_clean
    assert (root / "abort").exists()
    store.close()
    assert not (root / "abort").exists()
    for path in golden_store("clean").rglob("*"):
        relative = path.relative_to(golden_store("clean"))
        if path.is_file() and relative.parts[0] not in {"timerwheel", "timerlog", "checkpoint"}:
            assert (root / relative).read_bytes() == path.read_bytes(), relative


def test_recovering_twice_changes_nothing(name: str, tmp_path: Path) -> None:
    root = copy_golden_store(name, tmp_path / "store")
    (root / "abort").write_text("1")
    seen = []
    for _ in range(2):
        store = MessageStore(golden_settings(root), files=FaultyFiles())
        report = store.load()
        offsets = [(q.topic, q.queue_id, q.next_offset) for q in store.queues if q.next_offset]
        store.abandon()
        log = [path.read_bytes() for path in sorted((root / "commitlog").iterdir())]
        seen.append((report.log_end, sorted(offsets), log, consume_queue_units(root)))
    assert seen[0] == seen[1]


def test_queues_built_from_the_log_are_those_of_the_peer(name: str, tmp_path: Path) -> None:
    root = copy_golden_store(name, tmp_path / "store")
    wanted = consume_queue_units(root)
    for path in root.glob("*consumequeue/*/*/0*"):
        path.unlink()
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    store.load()
    store.close()
    built = consume_queue_units(root)
    assert {queue: built[queue] for queue in wanted} == wanted


def entries(files: list[bytes]) -> list[tuple[int, int]]:
    """Key hash and physical offset of each entry, in order."""
    found = []
    for data in files:
        (count,) = struct.unpack_from(">i", data, 36)
        entry = struct.iter_unpack(">iqii", data[40 + 4 * 100 : 40 + 4 * 100 + 20 * count])
        found += [(key_hash, offset) for key_hash, offset, *_ in entry if key_hash]
    return found


def test_the_index_built_from_the_log_is_that_of_the_peer(tmp_path: Path) -> None:
    """Byte for byte up to the first batch, whose messages the peer does not index."""
    root = copy_golden_store("clean", tmp_path / "store")
    wanted = index_files(root)
    for path in (root / "index").iterdir():
        path.unlink()
    (root / "checkpoint").unlink()
    (root / "abort").write_text("1")
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    store.load()
    store.close()
    built = index_files(root)
    assert built[:3] == wanted[:3]
    peers = entries(wanted)
    more = [entry for entry in entries(built) if entry not in peers]
    assert {offset for _, offset in more} == {1084849, 1085639}
    assert [entry for entry in entries(built) if entry not in more] == peers


def test_messages_of_batches_are_indexed_as_well(tmp_path: Path) -> None:
    root = copy_golden_store("clean", tmp_path / "store")
    for path in (root / "index").iterdir():
        path.unlink()
    (root / "abort").write_text("1")
    store = MessageStore(golden_settings(root), files=FaultyFiles())
    store.load()
    for question, physical_offsets in manifest("clean")["indexQueries"].items():
        topic, key = question.split("#", 1)
        found = query_index(store, topic, key, 64, 0, 1 << 62)
        wanted = {offset for offset in physical_offsets if isinstance(offset, int)}
        if key in {f"inner-{number}" for number in range(5)}:
            wanted = {1084849, 1085639} if key in {"inner-0", "inner-1"} else {1084849}
        assert sorted(found) == sorted(wanted), question


def test_the_checkpoint_is_read_as_the_peer_wrote_it() -> None:
    checkpoint = Checkpoint.load(golden_store("kill9") / "checkpoint")
    assert checkpoint.logics_physical_offset == 0x10B346
    assert checkpoint.physic_msg_timestamp == 0x1A1FC64C472
    assert checkpoint.index_msg_timestamp == 0x1A1FC64EBB0
    records = {m.physical_offset: m for _, m in log_records("kill9")}
    newest = records[checkpoint.logics_physical_offset]
    assert newest.store_timestamp == checkpoint.logics_msg_timestamp


def test_a_store_goes_on_where_the_peer_stopped(name: str, opened: MessageStore) -> None:
    queue = opened.queue("G_PLAIN", 0)
    first = queue.next_offset
    for number in range(2000):
        opened.write_path.append((queue, b"%d" % number, b"", 0, 0, 0, 1, 0), bytes(8))
        opened.write_path.publish()
    bodies = [message.body for message in drain(opened, queue)]
    assert bodies[first:] == [b"%d" % number for number in range(2000)]
