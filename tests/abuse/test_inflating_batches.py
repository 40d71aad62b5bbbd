"""Small compressed bodies that would fill their reader's memory."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import lz4.frame
import pytest
import zstandard

import headrace
from headrace import Message, MessageQueue
from headrace.received import BodyLimits, MessageBatch
from headrace.table.entries import Keyed
from headrace_protocol.columns import RecordColumns
from headrace_protocol.compression import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    UNREADABLE,
    BatchTooLarge,
    BodyTooLarge,
)
from headrace_protocol.message import encode_record

SIZE = 1 << 18
COUNT = 40
BOMBS = {
    "zlib": (zlib.compress(bytes(SIZE)), COMPRESSION_ZLIB),
    "lz4": (lz4.frame.compress(bytes(SIZE)), COMPRESSION_LZ4),
    "zstd": (zstandard.compress(bytes(SIZE)), COMPRESSION_ZSTD),
}


def batch(stored: bytes, kind: int, *, count: int = COUNT, **limits: Any) -> MessageBatch:
    return batch_of([stored] * count, kind, **limits)


def batch_of(
    stored: list[bytes], kind: int, *, properties: Sequence[bytes] = (), **limits: Any
) -> MessageBatch:
    records = b"".join(
        encode_record(
            topic="T",
            queue_id=0,
            queue_offset=offset,
            body=body,
            sys_flag=COMPRESSED | kind,
            properties=raw,
        )
        for offset, (body, raw) in enumerate(zip_longest(stored, properties, fillvalue=b""))
    )
    columns = RecordColumns.from_records(records)
    return MessageBatch(MessageQueue("T", "b", 0), 0, len(stored), columns, BodyLimits(**limits))


@pytest.mark.parametrize(("stored", "kind"), BOMBS.values(), ids=BOMBS.keys())
def test_a_batch_is_decompressed_no_further_than_allowed(stored: bytes, kind: int) -> None:
    bombs = batch(stored, kind, batch_bytes_max=4 * SIZE)
    tracemalloc.start()
    try:
        for read in (bombs.values, bombs.to_arrow):
            with pytest.raises(
                BatchTooLarge, match=r"40 messages have more than 1048576 .*max_messages"
            ):
                read()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < COUNT * SIZE // 2


def test_what_fits_is_read_to_the_last_byte() -> None:
    bombs = batch(*BOMBS["zlib"], count=3, batch_bytes_max=3 * SIZE)
    assert bombs.values() == [bytes(SIZE)] * 3
    bombs.limits = BodyLimits(batch_bytes_max=3 * SIZE - 1)
    with pytest.raises(BatchTooLarge):
        bombs.values()


def test_messages_of_such_a_batch_can_be_read_one_by_one() -> None:
    bombs = batch(*BOMBS["zlib"], batch_bytes_max=4 * SIZE)
    assert sum(len(message.body) for message in bombs) == COUNT * SIZE
    assert len(bombs.part(0, 4).values()) == 4, "or a few at once"


def test_a_single_large_body_has_its_own_error() -> None:
    with pytest.raises(BodyTooLarge):
        batch(*BOMBS["zlib"], body_bytes_max=SIZE - 1).values()


@pytest.mark.parametrize(
    ("stored", "reason"),
    [(BOMBS["zlib"][0], "a ZLIB body of"), (b"no body", "ZLIB body does not decompress")],
)
def test_an_error_says_which_body_it_is_of(stored: bytes, reason: str) -> None:
    good = zlib.compress(b"good")
    mixed = batch_of([good, good, stored, good], COMPRESSION_ZLIB, body_bytes_max=SIZE - 1)
    message = mixed[2]
    for read in (mixed.values, mixed.to_arrow, lambda: message.body):
        with pytest.raises(UNREADABLE, match=f"^T/b/0@2: {reason}"):
            read()
    # What the others are is readable.
    assert [each.body for each in mixed if each.queue_offset != 2] == [b"good"] * 3


def test_a_table_keeps_the_error_of_one_key() -> None:
    """Its other keys are readable, and it follows its topic further."""
    mixed = batch_of(
        [zlib.compress(b"good"), BOMBS["zlib"][0]],
        COMPRESSION_ZLIB,
        properties=[b"KEYS\x01a", b"KEYS\x01b"],
        body_bytes_max=SIZE - 1,
    )
    keys, (good, bad), _ = Keyed.of(mixed)
    assert (keys, good) == (["a", "b"], b"good")
    assert str(bad).startswith("T/b/0@1: a ZLIB body of")


def test_columns_have_the_same_bound() -> None:
    columns = batch(*BOMBS["zlib"], count=3).columns
    assert columns.bodies(3 * SIZE) == [bytes(SIZE)] * 3
    with pytest.raises(BatchTooLarge, match="3 messages have more than 786431 bytes"):
        columns.bodies(3 * SIZE - 1)


@pytest.mark.slow
async def test_consumers_take_the_bound_as_a_setting() -> None:
    async with headrace.embedded(memory=True) as mq:
        async with mq.producer() as producer:
            await producer.send(Message("T", bytes(SIZE)))
        async with mq.consumer("g", "T", start="earliest", batch_bytes_max=SIZE - 1) as consumer:
            async for received in consumer.batches():
                with pytest.raises(BatchTooLarge, match="more than 262143 bytes"):
                    received.values()
                break
