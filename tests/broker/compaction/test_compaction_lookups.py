"""GET_BY_KEY: the newest message of a key, wherever it is."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from headrace_broker.compaction.lookups import LookupLimits, Tails
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import GetByKeyHeader, GetByKeyResponseHeader
from headrace_protocol.key_lookup import NoRecord, WantedKey, decode_found, encode_keys
from headrace_protocol.message import decode_record
from tests.broker.compaction.test_compaction_source import C, compact, create, follow, start
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.memory import kept_bytes
from tests.support.stores import crash


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    """With an empty compacted topic."""
    broker = start(tmp_path)
    create(broker)
    return broker


def ask(
    broker: BrokerUnderTest, *keys: WantedKey, bytes_max: int = 1 << 20, topic: str = C
) -> Answer:
    header = GetByKeyHeader(topic=topic, count=len(keys), max_msg_bytes=bytes_max)
    return broker.ask(RequestCode.GET_BY_KEY, header, encode_keys(keys))


def get(broker: BrokerUnderTest, *keys: WantedKey) -> list[bytes | NoRecord]:
    """Bodies, asked for until each key is answered."""
    bodies: list[bytes | NoRecord] = []
    while len(bodies) < len(keys):
        answer = ask(broker, *keys[len(bodies) :])
        count = answer.command.header(GetByKeyResponseHeader).count
        assert count > 0
        bodies += (
            found if isinstance(found, NoRecord) else decode_record(found).body
            for found in decode_found(count, answer.body)
        )
    return bodies


def key(name: str, queue_id: int = 0, seen_offset: int = -1) -> WantedKey:
    return WantedKey(name.encode(), queue_id, seen_offset)


def put(broker: BrokerUnderTest, name: str, body: bytes) -> None:
    broker.store_message(C, 0, body, KEYS=name)


def test_keys_are_found_in_both_logs(broker: BrokerUnderTest) -> None:
    assert get(broker, key("a")) == [NoRecord.NEVER]
    put(broker, "a", b"1")
    put(broker, "b", b"2")
    assert get(broker, key("a"), key("b"), key("c")) == [b"1", b"2", NoRecord.NEVER]
    follow(broker)
    assert get(broker, key("a"), key("b"), key("c")) == [b"1", b"2", NoRecord.NEVER]
    put(broker, "a", b"3")
    put(broker, "c d", b"")
    assert get(broker, key("a"), key("b"), key("c d"), key("c")) == [
        b"3",
        b"2",
        b"",
        NoRecord.NEVER,
    ]
    assert get(broker, key("a", 0, 3), key("a", 0, 4)) == [b"3", NoRecord.NOT_YET]


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_the_index_agrees_with_a_dictionary(tmp_path: Path, ending: str) -> None:
    broker = start(tmp_path)
    create(broker)
    rng, table = Random(8), dict[str, bytes]()
    keys = [f"key {number}" for number in range(300)]
    for number in range(6):
        for _ in range(100):
            name = rng.choice(keys)
            table[name] = b"%d" % rng.randrange(1000)
            put(broker, name, table[name])
        if number % 2:
            follow(broker)
        if number == 3:
            compact(broker)
        expected = [table.get(name, NoRecord.NEVER) for name in keys]
        assert get(broker, *map(key, keys)) == expected
        if number in {2, 4}:
            broker.topics.saved.finish()
            broker.close() if ending == "stop" else crash(broker.store)
            broker = start(tmp_path)
            assert get(broker, *map(key, keys)) == expected


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    broker = start(tmp_path)
    create(broker)
    put(broker, "a", b"1")
    follow(broker)
    assert get(broker, key("a")) == [b"1"]
    broker.close()
    (path,) = (tmp_path / "store/compaction/headrace/C/0/keys").iterdir()
    for data in (b"", b"\xff" * path.stat().st_size):
        path.write_bytes(data)
        broker = start(tmp_path)
        assert get(broker, key("a")) == [b"1"]
        broker.close()


def index_file(folder: Path) -> Path:
    (path,) = (folder / "store/compaction/headrace/C/0/keys").iterdir()
    return path


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.fixture
def filled(tmp_path: Path) -> dict[str, bytes]:
    """The values of a topic in a closed store, whose index is nearly full."""
    broker = start(tmp_path)
    create(broker)
    values = {f"key {number}": b"%d" % number for number in range(700)}
    for name, body in values.items():
        put(broker, name, body)
    follow(broker)
    assert get(broker, *map(key, values)) == [*values.values()]
    broker.topics.saved.finish()
    broker.close()
    return values


@pytest.mark.slow
def test_each_flipped_bit_of_the_index_is_found_or_harmless(
    tmp_path: Path, filled: dict[str, bytes]
) -> None:
    path = index_file(tmp_path)
    whole, seed = path.read_bytes(), Random().getrandbits(32)
    rng, made_anew = Random(seed), 0
    head, slots = range(8 * 52), range(8 * 64, 8 * len(whole))
    for bit in (*rng.sample(head, 4), *rng.sample(slots, 8)):
        path.write_bytes(whole)
        flip_bit(path, bit)
        broker = start(tmp_path)
        found = get(broker, *map(key, filled), key("never"))
        assert found == [*filled.values(), NoRecord.NEVER], f"seed {seed}, bit {bit}"
        broker.close()
        made_anew += path.read_bytes() == whole
    assert made_anew > 3, f"seed {seed}"


@pytest.mark.parametrize("part", ["hash", "value"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_entry_is_not_copied_to_a_larger_index(
    tmp_path: Path, filled: dict[str, bytes], part: str, is_open: bool
) -> None:
    path = index_file(tmp_path)
    slots = np.frombuffer(path.read_bytes(), [("hash", "<u8"), ("value", "<u8")], offset=64)
    slot = int(np.flatnonzero(slots["value"])[100])
    flip_bit(path, 8 * (64 + 16 * slot) + (7 if part == "hash" else 64))
    broker = start(tmp_path)
    if is_open:
        broker.compaction.queues.build_index(C, 0)
    for number in range(700, 800):
        put(broker, f"key {number}", b"%d" % number)
    follow(broker)
    names = [f"key {number}" for number in range(800)]
    assert get(broker, *map(key, names)) == [b"%d" % number for number in range(800)]
    assert len(index_file(tmp_path).read_bytes()) > len(slots) * 16


def test_a_damaged_seed_makes_the_index_anew(tmp_path: Path, filled: dict[str, bytes]) -> None:
    path = tmp_path / "store/compaction/headrace/seed.json"
    before = path.read_bytes()
    path.write_bytes(before[:-3])
    broker = start(tmp_path)
    assert get(broker, *map(key, filled)) == [*filled.values()]
    assert path.read_bytes() != before


def test_a_start_after_a_stop_enters_no_key_again(tmp_path: Path, filled: dict[str, bytes]) -> None:
    broker = start(tmp_path)
    assert get(broker, key("key 1")) == [filled["key 1"]]
    put(broker, "last", b"x")
    follow(broker)
    trio.run(broker.compaction.finish)
    broker.close()
    (entered,) = struct.unpack_from("<q", index_file(tmp_path).read_bytes(), 40)
    broker = start(tmp_path)
    assert entered == broker.compaction.queues.open(C, 0).log.end_offset
    assert get(broker, key("last"), key("key 1")) == [b"x", filled["key 1"]]


def test_any_queue_has_the_message_that_was_stored_last(tmp_path: Path) -> None:
    broker = start(tmp_path)
    broker.create_topic(C, 3, attributes={"cleanup.policy": "COMPACTION"})
    for queue_id, body in ((2, b"old"), (0, b"new"), (1, b"other")):
        broker.store_message(C, queue_id, body, KEYS="k" if queue_id != 1 else "l")
    assert get(broker, key("k", -1), key("l", -1), key("m", -1)) == [
        b"new",
        b"other",
        NoRecord.NEVER,
    ]


def test_answers_are_bounded(broker: BrokerUnderTest) -> None:
    for name in "abc":
        put(broker, name, b"x" * 200)
    get(broker, key("a"))
    answer = ask(broker, key("a"), key("b"), key("c"), bytes_max=1)
    assert answer.command.header(GetByKeyResponseHeader).count == 1
    assert len(decode_found(1, answer.body)) == 1


def test_what_is_refused(broker: BrokerUnderTest) -> None:
    broker.create_topic("T")
    assert "not compacted" in ask(broker, key("a"), topic="T").remark
    assert "there are 1" in ask(broker, key("a", 1)).remark
    assert ask(broker, key("a"), topic="none").code == ResponseCode.TOPIC_NOT_EXIST


# --- what lookups keep ---------------------------------------------------------------------


def test_a_long_key_takes_no_more_memory_than_a_short_one(broker: BrokerUnderTest) -> None:
    assert get(broker, key("a")) == [NoRecord.NEVER]
    numbers = iter(range(10))

    def look() -> None:
        number = next(numbers)
        for each in range(50):
            put(broker, f"{number}-{each}-" + "k" * 30_000, b"body")
        assert get(broker, key("a")) == [NoRecord.NEVER]

    assert 0 < kept_bytes(look) < 100_000
    assert get(broker, key("0-7-" + "k" * 30_000)) == [b"body"]


def test_nothing_is_kept_of_a_deleted_topic(broker: BrokerUnderTest) -> None:
    broker.create_topic("other", 1)
    put(broker, "a", b"1")
    assert get(broker, key("a")) == [b"1"]
    broker.topics.delete("other")
    assert len(broker.compaction.lookups.tails) == 1
    broker.topics.delete(C)
    assert len(broker.compaction.lookups.tails) == 0


def test_the_keys_of_all_queues_are_bounded(tmp_path: Path) -> None:
    broker = start(tmp_path)
    broker.compaction.lookups.limits = LookupLimits(keys_max=25)
    broker.create_topic(C, 4, attributes={"cleanup.policy": "COMPACTION"})
    for queue_id in range(4):
        for number in range(10):
            broker.store_message(C, queue_id, b"%d" % queue_id, KEYS=f"k{number}")
    for _ in range(2):
        for queue_id in range(4):
            assert get(broker, key("k3", queue_id)) == [b"%d" % queue_id]
            assert broker.compaction.lookups.tails.key_count <= 25
    assert get(broker, WantedKey(b"k3"))[0] == b"3"


class _Unasked(dict[int, int]):
    """Keys of a tail that nobody has asked for."""

    def __len__(self) -> int:
        raise AssertionError("each lookup would take as long as there are tails")


def test_the_keys_of_a_tail_are_counted_when_it_was_asked_for() -> None:
    tails = Tails()
    compacted: Any = SimpleNamespace(key_index=SimpleNamespace(position=0))

    def ask_for(queue_id: int, key_count: int) -> Any:
        queue: Any = SimpleNamespace(topic=C, queue_id=queue_id)
        tail = tails.of(queue, compacted)
        tail.offsets = dict.fromkeys(range(key_count), 0)
        tails.bound(50)
        return tail

    asked = [ask_for(queue_id, 10) for queue_id in range(10)]
    assert (len(tails), tails.key_count) == (5, 50)
    for tail in asked:
        tail.offsets = _Unasked()
    ask_for(99, 20)
    assert (len(tails), tails.key_count) == (4, 50)
    tails.drop_topics(lambda _topic: False)
    assert (len(tails), tails.key_count) == (0, 0)
