"""Batches and pre-encoded records give what single appends give."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker.store.errors import RecordTooLarge, StoreBusy
from headrace_protocol.message import (
    TRANSACTION_PREPARED,
    CorruptRecord,
    StoredMessage,
    encode_batch,
    encode_host,
    encode_properties,
    encode_record,
    tags_code_of,
)
from tests.support.stores import HOST, open_store, read_all

ITEMS = st.lists(
    st.tuples(
        st.integers(-(2**31), 2**31 - 1),
        st.binary(max_size=80),
        st.dictionaries(st.sampled_from(["TAGS", "KEYS"]), st.text("ab", min_size=1)).map(
            encode_properties
        ),
    ),
    min_size=1,
    max_size=20,
)
HOSTS = st.sampled_from([HOST, encode_host("::1", 1)])
NAMES = [name for name in StoredMessage.__slots__ if not name.startswith("_")]


def fields(messages: list[StoredMessage]) -> list[list[object]]:
    return [[getattr(message, name) for name in NAMES] for message in messages]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(ITEMS, max_size=4), HOSTS, HOSTS)
def test_a_batch_is_stored_as_its_items_would_be(
    batches: list[list[tuple[int, bytes, bytes]]], born_host: bytes, store_host: bytes
) -> None:
    seen = []
    for is_batch in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(Path(folder), store_host=store_host, commit_log_file_bytes=1 << 16)
            queue = store.queue("T", 2)
            for items in batches:
                first = queue.next_offset
                if is_batch:
                    body = memoryview(encode_batch(items))
                    answer = store.append_batch(queue, body, 2, 7, born_host, 1)
                else:
                    offsets = [
                        store.append(queue, body, raw, tags_code_of(raw), flag, 2, 7, born_host, 1)
                        for flag, body, raw in items
                    ]
                    answer = (first, offsets)
                assert answer[0] == first
                store.dispatch()
                seen.append(answer)
            units = list(queue.consume_queue.iter_units(0))
            seen.append((fields(read_all(store, queue)), units))
            store.close()
    half = len(seen) // 2
    assert seen[:half] == seen[half:]


def test_a_batch_goes_whole_to_the_next_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    store.append_batch(queue, memoryview(encode_batch([(0, bytes(1000), b"")] * 2)), 0, 1, HOST, 0)
    _, offsets = store.append_batch(
        queue, memoryview(encode_batch([(0, bytes(1000), b"")] * 2)), 0, 1, HOST, 0
    )
    assert offsets[0] == 4096
    with pytest.raises(RecordTooLarge, match="record has"):
        store.append_batch(
            queue, memoryview(encode_batch([(0, bytes(1000), b"")] * 4)), 0, 1, HOST, 0
        )
    store.close()


@pytest.mark.parametrize("cut", [b"", b"x", encode_batch([(0, b"a", b"")])[:-1]])
def test_a_malformed_batch_stores_nothing(cut: bytes, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    with pytest.raises(CorruptRecord):
        store.append_batch(queue, memoryview(cut), 0, 1, HOST, 0)
    assert (queue.next_offset, store.max_physical_offset) == (0, 0)
    store.close()


def test_a_batch_does_not_overfill_the_ring(tmp_path: Path) -> None:
    store = open_store(tmp_path, commit_log_file_bytes=1 << 16)
    queue = store.queue("T", 0)
    batch = memoryview(encode_batch([(0, b"", b"")] * 40))
    store.append_batch(queue, batch, 0, 1, HOST, 0)
    with pytest.raises(StoreBusy):
        store.append_batch(queue, batch, 0, 1, HOST, 0)
    store.dispatch()
    store.append_batch(queue, batch, 0, 1, HOST, 0)
    store.dispatch()
    assert len(read_all(store, queue)) == 80
    store.close()


# --- records that a producer encoded -------------------------------------------------------


def encoded(items: list[tuple[int, bytes, bytes]], **changes: object) -> bytes:
    common = {"topic": "T", "queue_id": 0, "born_timestamp": 7, "born_host": HOST}
    return b"".join(
        encode_record(**{**common, "flag": flag, "body": body, "properties": raw, **changes})
        for flag, body, raw in items
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(ITEMS, max_size=4))
def test_encoded_records_are_stored_as_single_ones_would_be(
    blocks: list[list[tuple[int, bytes, bytes]]],
) -> None:
    seen = []
    for is_block in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(Path(folder), commit_log_file_bytes=1 << 16)
            queue = store.queue("T", 2)
            for items in blocks:
                if is_block:
                    store.append_records(queue, memoryview(encoded(items)))
                else:
                    for flag, body, raw in items:
                        store.append(queue, body, raw, tags_code_of(raw), flag, 0, 7, HOST, 0)
                store.dispatch()
            units = list(queue.consume_queue.iter_units(0))
            seen.append((fields(read_all(store, queue)), units))
            store.close()
    assert seen[0] == seen[1]


GOOD = encoded([(0, b"body", b"k\x01v\x02")])


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"", "no records"),
        (GOOD[:-1], "size"),
        (GOOD + b"x", "only 1 bytes are left"),
        (encoded([(0, b"a", b"")], topic="U"), "not of topic T"),
        (encoded([(0, b"a", b"")], topic="t" * 200), "plain V1"),
        (encoded([(0, b"a", b"")], born_host=bytes(20)), "plain V1"),
        (encoded([(0, b"a", b"")], sys_flag=TRANSACTION_PREPARED), "plain V1"),
        (GOOD[:88] + b"B" + GOOD[89:], "CRC"),
        (GOOD[:-5] + b"\0" + GOOD[-4:], "properties"),
    ],
)
def test_a_wrong_block_stores_nothing(block: bytes, reason: str, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    queue = store.queue("T", 0)
    with pytest.raises(CorruptRecord, match=reason):
        store.append_records(queue, memoryview(block))
    assert (queue.next_offset, store.max_physical_offset) == (0, 0)
    store.close()


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    block = bytearray(GOOD * 2)
    block[data.draw(st.integers(0, len(block) - 1))] ^= data.draw(st.integers(1, 255))
    store = open_store(tmp_path_factory.mktemp("store"))
    queue = store.queue("T", 0)
    try:
        store.append_records(queue, memoryview(block))
    except CorruptRecord:
        assert queue.next_offset == 0
    else:
        store.dispatch()
        assert [m.queue_offset for m in read_all(store, queue)] == [0, 1]
    store.close()
