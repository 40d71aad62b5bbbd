"""Small compressed bodies that would fill their reader's memory."""

from __future__ import annotations

import tracemalloc
import zlib

import lz4.frame
import pytest
import zstandard

import headrace
from headrace import Message, MessageQueue
from headrace.received import BodyLimits, MessageBatch
from headrace_protocol.columns import RecordColumns
from headrace_protocol.compression import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
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


def batch(stored: bytes, kind: int, *, count: int = COUNT, **limits: int) -> MessageBatch:
    records = b"".join(
        encode_record(
            topic="T", queue_id=0, queue_offset=offset, body=stored, sys_flag=COMPRESSED | kind
        )
        for offset in range(count)
    )
    columns = RecordColumns.from_records(records)
    return MessageBatch(MessageQueue("T", "b", 0), 0, count, columns, BodyLimits(**limits))


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
