"""store copy, dump and stat against what the real store reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from zlib_ng.zlib_ng import crc32

from headrace_broker.store.errors import StoreError, StoreLocked
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.store.message_store import MessageStore
from headrace_broker.store_tools.copy import CopyReport, copy_topics
from headrace_broker.store_tools.directory import open_directory
from headrace_broker.store_tools.dump import Wanted, dump
from headrace_broker.store_tools.fsck import check
from headrace_broker.store_tools.log_reader import LogDamage
from headrace_broker.store_tools.stat import store_stat, topic_stats
from headrace_broker.topics.incarnations import Incarnations
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion
from headrace_protocol.message import StoredMessage, encode_properties
from headrace_protocol.statictopic.mapping_file import decode_file, encode_file
from headrace_protocol.system_topics import SCHEDULE_TOPIC
from tests.broker.statictopic.test_static_changes import led_here
from tests.support.damage import contents, quiet
from tests.support.golden import copy_golden_store, golden_settings, golden_store
from tests.support.stores import (
    HOST,
    SetClock,
    crash,
    open_store,
    put,
    query_index,
    read_all,
    small_settings,
)


def copied(root: Path, *topics: str) -> CopyReport:
    with open_directory(root, small_settings(root)) as source:
        return copy_topics(source, root.with_name("copy"), list(topics), quiet)


def without_place(records: list[bytes]) -> list[bytes]:
    return [record[:28] + record[36:] for record in records]


def test_a_copy_has_the_topics_and_nothing_else(root: Path) -> None:
    store = open_store(root)
    wanted = {name: bodies for name, bodies in contents(store).items() if name[0] in "AC"}
    found_before = query_index(store, "C", "x20", 9, 0, 1 << 62)
    store.close()
    report = copied(root, "A", "C")
    assert (report.record_count, report.unplaced_count, report.damage) == (40, 0, [])
    target = root.with_name("copy")
    with open_directory(target, small_settings(target)) as directory:
        assert check(directory, quiet).findings == []
    store = open_store(target)
    found = contents(store)
    assert found.keys() == wanted.keys()
    for name, records in found.items():
        assert without_place(records) == without_place(wanted[name])
    assert len(query_index(store, "C", "x20", 9, 0, 1 << 62)) == len(found_before) == 1
    assert store.commit_log.max_offset < 60 * 350
    store.close()


def test_a_copy_goes_on_where_the_topic_was(root: Path) -> None:
    copied(root, "A")
    store = open_store(root.with_name("copy"))
    queue = store.queue("A", 0)
    next_offset = queue.next_offset
    assert next_offset > 5
    put(store, queue, b"more")
    assert read_all(store, queue)[-1].queue_offset == next_offset
    crash(store)
    store = open_store(root.with_name("copy"))
    assert read_all(store, store.queue("A", 0))[-1].body == b"more"
    store.close()


def test_the_older_messages_of_a_queue_may_be_gone(root: Path) -> None:
    (root / "commitlog" / f"{0:020d}").unlink()
    store = open_store(root)
    queue = store.queue("A", 0)
    first = store.source(queue).min_offset()
    bodies = [message.body for message in read_all(store, queue)]
    store.close()
    copied(root, "A")
    store = open_store(root.with_name("copy"))
    queue = store.queue("A", 0)
    assert store.source(queue).min_offset() == first > 0
    assert [message.body for message in read_all(store, queue)] == bodies
    store.close()


def test_damage_is_left_out_and_named(root: Path) -> None:
    with (root / "commitlog" / f"{4096:020d}").open("r+b") as file:
        file.seek(100)
        file.write(b"\x55\x55")
    report = copied(root, "A", "B", "C")
    assert report.record_count == 59
    assert [damage.start for damage in report.damage] == [4096]


def test_progress_and_topics_come_along(root: Path) -> None:
    config = root / "config"
    ConfigFile(config / "topics.json").save(
        b'{"dataVersion":{"counter":1},"topicConfigTable":{"A":{"perm":6},"B":{"perm":4}}}'
    )
    ConfigFile(config / "consumerOffset.json").save(
        b'{"groupTopicMap":{"g":["A","B"],"h":["B"]},"offsetTable":{"A@g":{0:5},"B@h":{0:6}}}'
    )
    ConfigFile(config / "subscriptionGroup.json").save(b'{"subscriptionGroupTable":{"g":{}}}')
    ConfigFile(config / "topicIncarnation.json").save(b'{"A":"1f","B":"2f"}')
    ConfigFile(config / "staticTopic.json").save(b'{"A":"static-1","B":"static-2"}')
    ConfigFile(config / "topicQueueMapping.json").save(
        encode_file({name: led_here(topic=name) for name in "AB"}, DataVersion())
    )
    copied(root, "A")
    tables = {
        path.name: fastjson.loads(ConfigFile(path).load() or b"")
        for path in (root.with_name("copy") / "config").iterdir()
    }
    assert tables == {
        "topics.json": {"dataVersion": {"counter": 1}, "topicConfigTable": {"A": {"perm": 6}}},
        "consumerOffset.json": {"groupTopicMap": {"g": ["A"]}, "offsetTable": {"A@g": {0: 5}}},
        "subscriptionGroup.json": {"subscriptionGroupTable": {"g": {}}},
        "topicIncarnation.json": {"A": "1f"},
        "staticTopic.json": {"A": "static-1"},
        "topicQueueMapping.json": tables["topicQueueMapping.json"],
    }
    mappings, _ = decode_file(fastjson.dumps(tables["topicQueueMapping.json"]))
    assert mappings == {"A": led_here(topic="A")}
    ids = ConfigFile(root.with_name("copy") / "config" / "topicIncarnation.json")
    assert Incarnations(ids, ["A"], lambda: 0).of("A") == "1f"


@pytest.mark.parametrize("topic", [SCHEDULE_TOPIC, "A"])
def test_delayed_messages_come_along_with_their_progress(root: Path, topic: str) -> None:
    store = open_store(root)
    put(store, store.queue(SCHEDULE_TOPIC, 0), b"delivered")
    store.close()
    progress = b'{"dataVersion":{"counter":1},"offsetTable":{1:1}}'
    ConfigFile(root / "config" / "delayOffset.json").save(progress)
    ConfigFile(root / "positions" / "schedule.json").save(b'{"levels":{},"logOffset":0}')
    copied(root, topic)
    config = root.with_name("copy") / "config"
    found = ConfigFile(config / "delayOffset.json").load()
    # Only with the queues that it is about.
    assert (found is not None) == (topic == SCHEDULE_TOPIC)
    assert found is None or fastjson.loads(found)["offsetTable"] == {1: 1}
    # It names places in the log, which are others in the copy.
    assert not (root.with_name("copy") / "positions" / "schedule.json").exists()


def test_a_record_checksum_fits_the_new_place(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    put(store, store.queue("B", 0), b"first")
    # As the peer appends it when told to; the record's place is part of it.
    slot = b"__CRC32#\x010000000000\x02"
    offset = store.write_path.append(
        (store.queue("A", 0), b"text", encode_properties({"KEYS": "k"}) + slot, 0, 0, 0, 1, 0), HOST
    )
    store.write_path.publish()
    store.close()
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    end = data.index(slot)
    checksum = crc32(bytes(data[offset:end])) & 0x7FFFFFFF
    data[end + 9 : end + 19] = f"{checksum:010d}"[::-1].encode()
    path.write_bytes(data)
    with open_directory(root, small_settings(root)) as directory:
        assert check(directory, quiet).damage == []
    copied(root, "A")
    target = root.with_name("copy")
    with open_directory(target, small_settings(target)) as directory:
        assert check(directory, quiet).damage == []
    data[offset + 16] ^= 1  # the user's flag, which no other checksum covers
    path.write_bytes(data)
    with open_directory(root, small_settings(root)) as directory:
        assert "own checksum" in check(directory, quiet).damage[0].problem


def test_a_copy_needs_a_topic_and_an_empty_place(root: Path) -> None:
    with pytest.raises(StoreError, match="no queue of topic Z"):
        copied(root, "Z")
    root.with_name("copy").mkdir()
    (root.with_name("copy") / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not empty"):
        copied(root, "A")
    store = open_store(root)
    with pytest.raises(StoreLocked):
        copied(root, "A")
    store.close()


def test_a_topic_of_the_peer_is_copied(tmp_path: Path) -> None:
    root = golden_store("clean")
    target = tmp_path / "copy"
    topics = ["G_BATCH", "G_UTF8", "SCHEDULE_TOPIC_XXXX"]
    with open_directory(root, golden_settings(root)) as source:
        copy_topics(source, target, topics, quiet)
    with open_directory(target, golden_settings(target)) as directory:
        assert check(directory, quiet).findings == []
    there = MessageStore(golden_settings(target), SetClock())
    here = MessageStore(golden_settings(copy_golden_store("clean", tmp_path / "here")), SetClock())
    for store in (here, there):
        store.load()
    for topic in topics:
        for queue in here.queues_of(topic):
            mine = there.find_queue(topic, queue.queue_id)
            assert mine is not None
            records = [m.encode() for m in read_all(here, queue)]
            assert without_place([m.encode() for m in read_all(there, mine)]) == without_place(
                records
            )
    for store in (here, there):
        store.close()


# --- dump and stat -------------------------------------------------------------------------


def dumped(root: Path, wanted: Wanted) -> list[StoredMessage | LogDamage]:
    with open_directory(root, small_settings(root)) as directory:
        return list(dump(directory, wanted, quiet))


def places(found: list[StoredMessage | LogDamage]) -> list[int]:
    return [m.physical_offset for m in found if isinstance(m, StoredMessage)]


def test_dump_gives_the_log_in_order(root: Path) -> None:
    every = dumped(root, Wanted())
    assert len(every) == 60
    assert places(every) == sorted(places(every))
    of_queue = dumped(root, Wanted("B", 1))
    assert {(m.topic, m.queue_id) for m in of_queue if isinstance(m, StoredMessage)} == {("B", 1)}
    assert len(of_queue) == 10
    middle = places(every)[30]
    assert places(dumped(root, Wanted(start=middle))) == places(every)[30:]


def test_dump_shows_damage_between_records(root: Path) -> None:
    with (root / "commitlog" / f"{4096:020d}").open("r+b") as file:
        file.write(b"\x55")
    every = dumped(root, Wanted())
    assert [found.start for found in every if isinstance(found, LogDamage)] == [4096]
    assert len(every) == 60


def test_stat_counts_what_can_be_read(root: Path) -> None:
    (root / "commitlog" / f"{0:020d}").unlink()
    store = open_store(root)
    readable = {
        queue.topic: sum(len(read_all(store, q)) for q in store.queues_of(queue.topic))
        for queue in store.queues
    }
    store.close()
    with open_directory(root, small_settings(root)) as directory:
        topics = topic_stats(directory, quiet)
        summary = store_stat(directory)
    assert {topic.topic: topic.messages for topic in topics} == readable
    for topic in topics:
        assert topic.queues == 2
        assert topic.oldest_ms is not None
        assert topic.newest_ms is not None
        assert 1_700_000_000_000 < topic.oldest_ms <= topic.newest_ms
    assert (summary.is_clean, summary.log_min_offset, summary.log_file_bytes) == (True, 4096, 4096)
