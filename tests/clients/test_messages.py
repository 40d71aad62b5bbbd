"""Received messages and batches outside their consumer: copies for other processes, and reprs."""

from __future__ import annotations

import pickle
import zlib

import numpy as np
import pytest

from headrace.errors import ConfigurationError
from headrace.received import BodyLimits, MessageBatch, ReceivedMessage
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.columns import RecordColumns
from headrace_protocol.compression import COMPRESSED, BodyTooLarge
from headrace_protocol.errors import CorruptRecord
from headrace_protocol.message import encode_properties, encode_record

QUEUE = MessageQueue(topic="T", broker_name="b", queue_id=2)
BODIES = (b"first", zlib.compress(b"second" * 100), b"", b"x" * 100)
LIMITS = BodyLimits(700, 2000)


def batch(*bodies: bytes, limits: BodyLimits = LIMITS) -> MessageBatch:
    """A batch of messages with a key each, the second one compressed."""
    records = [
        encode_record(
            topic="T",
            queue_id=2,
            body=body,
            queue_offset=7 + index,
            physical_offset=1000 * index,
            properties=encode_properties({"KEYS": f"key-{index}", "colour": "red"}),
            sys_flag=COMPRESSED if index == 1 else 0,
        )
        for index, body in enumerate(bodies)
    ]
    # As in a pull's response, with other bytes before and after.
    data = memoryview(b"".join([b"before", *records, b"after"]))[6:-5]
    return MessageBatch(QUEUE, 7, 7 + len(bodies), RecordColumns.from_records(data), limits)


def facts(message: ReceivedMessage) -> tuple[object, ...]:
    return (message.queue, message.queue_offset, message.body, message.key, message.properties,
            message.message_id, message.store_timestamp_ms)  # fmt: skip


def test_a_pickled_batch_has_the_same_messages() -> None:
    read = batch(*BODIES)
    for part in (read, read.part(1, 3), read.part(2, 2)):
        copy = pickle.loads(pickle.dumps(part))
        assert [facts(each) for each in copy] == [facts(each) for each in part]
        assert copy.values() == part.values()
        assert copy.queue_offset == part.queue_offset
        assert copy.next_offset == part.next_offset
        assert copy.limits == LIMITS
        assert np.array_equal(copy.columns.physical_offset, part.columns.physical_offset)


@pytest.mark.parametrize("index", range(4))
def test_a_pickled_message_is_the_same_without_its_batch(index: int) -> None:
    read = batch(*BODIES, bytes(1_000_000))
    pickled = pickle.dumps(read[index])
    assert len(pickled) < 3000
    assert facts(pickle.loads(pickled)) == facts(read[index])
    assert facts(pickle.loads(pickle.dumps(list(read)[index]))) == facts(read[index])


def test_a_pickled_message_from_a_record_is_the_same() -> None:
    message = ReceivedMessage.from_stored(batch(*BODIES)[0].stored, "b")
    assert facts(pickle.loads(pickle.dumps(message))) == facts(message)


def test_a_pickled_message_keeps_the_limit_of_its_consumer() -> None:
    read = batch(*BODIES, limits=BodyLimits(599, 2000))
    with pytest.raises(BodyTooLarge):
        pickle.loads(pickle.dumps(read[1])).body  # noqa: B018


def test_a_pickled_message_belongs_to_no_consumer() -> None:
    read = batch(*BODIES)
    read.returns = object()  # type: ignore[assignment]  # cannot be pickled by its own means
    copy = pickle.loads(pickle.dumps(read[0]))
    with pytest.raises(ConfigurationError, match="not read by a Consumer"):
        copy.reject()


def test_a_damaged_message_is_still_damaged_after_pickle() -> None:
    read = batch(*BODIES)
    data = bytearray(read.columns.data)
    data[data.index(b"first")] ^= 1
    damaged = MessageBatch(QUEUE, 7, 11, RecordColumns.from_records(bytes(data)))
    copy = pickle.loads(pickle.dumps(damaged))
    for message in (damaged[0], copy[0], pickle.loads(pickle.dumps(damaged[0]))):
        assert repr(message) == "<ReceivedMessage T/b/2@7 (damaged)>"
        with pytest.raises(CorruptRecord):
            message.body  # noqa: B018


def test_a_message_shows_its_key_and_the_start_of_its_body() -> None:
    texts = [repr(each) for each in batch(*BODIES)]
    assert texts[0] == "<ReceivedMessage T/b/2@7 key='key-0' body=b'first'>"
    assert texts[1].startswith("<ReceivedMessage T/b/2@8 key='key-1' body of ")
    assert texts[1].endswith(" bytes, compressed>")
    assert texts[3] == (f"<ReceivedMessage T/b/2@10 key='key-3' body={b'x' * 40!r}... (100)>")
    read = batch(*BODIES)[1]
    assert read.body.startswith(b"second")
    assert "body=b'secondsecond" in repr(read)
