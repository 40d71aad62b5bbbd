"""POP's handles, offsets in answers and acks in batches: Apache's texts, and forged ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby

import pytest

from headrace_protocol.bounds import ITEMS_MAX, OutOfBounds
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import decode_records
from headrace_protocol.pop.batch_ack import (
    BITS_MAX,
    BatchAck,
    BatchAckBody,
    decode_bits,
    encode_bits,
)
from headrace_protocol.pop.handle import (
    HANDLE_CHARS_MAX,
    ORDER_REVIVE_QUEUE,
    Handle,
    TopicKind,
    original_topic,
    parse,
)
from headrace_protocol.pop.headers import POP_MESSAGES_MAX, AckMessageHeader
from headrace_protocol.pop.infos import (
    INFO_CHARS_MAX,
    OrderCount,
    PoppedQueue,
    encode_offsets,
    encode_order_counts,
    parse_offsets,
    parse_order_counts,
)
from tests.support.golden_frames import GoldenFrame, golden_frames
from tests.support.rights import request_of
from tests.support.seeds import seeds

HANDLE = Handle(7, 1_795_235_851_336, 60_000, 3, TopicKind.RETRY_V2, "broker-a", 5, 9)
INT64_MAX = 2**63 - 1


def golden(name: str, *, response: bool = False) -> Iterator[GoldenFrame]:
    for frame in golden_frames():
        if frame.request_name == name and frame.response is response and frame.ext:
            yield frame


# -- Apache's --------------------------------------------------------------------------------------


def test_recorded_handles_are_written_back() -> None:
    acks = list(golden("ACK_MESSAGE"))
    assert len(acks) > 4
    for frame in acks:
        assert frame.ext is not None
        header = request_of(frame.code, frame.ext).header(AckMessageHeader)
        handle = parse(header.extra_info)
        assert handle.text() == header.extra_info
        assert handle.broker_name == frame.ext["bname"]
        assert (handle.queue_id, handle.queue_offset) == (header.queue_id, header.offset)
        assert handle.topic(header.topic, header.consumer_group) == header.topic


def test_recorded_offsets_are_those_of_the_records() -> None:
    answers = list(golden("POP_MESSAGE", response=True))
    assert answers
    for frame in answers:
        assert frame.ext is not None
        infos = frame.ext["startOffsetInfo"], frame.ext["msgOffsetInfo"]
        queues = parse_offsets(*infos)
        assert encode_offsets(queues) == infos
        records = [(r.queue_id, r.queue_offset) for r in decode_records(frame.body)]
        assert records == [(q.queue_id, offset) for q in queues for offset in q.offsets]


def test_acks_are_in_the_form_of_fastjson() -> None:
    # As Apache RocketMQ 5.5.0 writes bits 0, 7, 9 and 70.
    text = (
        b'{"acks":[{"b":"gQIAAAAAAABA","c":"g","it":60000,"pt":1795235851336,"q":2,"r":"1",'
        b'"rq":3,"so":5,"t":"T"}],"brokerName":"broker-a"}'
    )
    body = BatchAckBody.decode(text)
    assert body.encode() == text
    (ack,) = body.acks
    assert ack.offsets() == [5, 12, 14, 75]
    handle = ack.handle(body.broker_name)
    assert handle.topic(ack.topic, ack.consumer_group) == "%RETRY%g_T"
    assert BatchAck.of("T", "g", handle, ack.offsets()) == ack


@pytest.mark.parametrize(
    ("topic", "kind"),
    [
        ("T", TopicKind.NORMAL),
        ("%RETRY%g_T", TopicKind.RETRY_V1),
        ("%RETRY%g+T", TopicKind.RETRY_V2),
    ],
)
def test_the_kind_of_topic_names_the_retry_topic(topic: str, kind: TopicKind) -> None:
    assert TopicKind.of(topic, "T", "g") is kind
    assert kind.topic("T", "g") == topic


@pytest.mark.parametrize("topic", ["U", "%RETRY%g", "%RETRY%h_T", "%RETRY%g-T", ""])
def test_another_topic_has_no_kind(topic: str) -> None:
    with pytest.raises(OutOfBounds, match="neither T nor its retry topic for group g"):
        TopicKind.of(topic, "T", "g")


# -- handles ---------------------------------------------------------------------------------------


def some_handle(rng: random.Random) -> Handle:
    def number(maximum: int = INT64_MAX // 2) -> int:
        return rng.choice([0, 1, rng.randrange(maximum), maximum])

    return Handle(
        number(INT64_MAX),
        number(),
        number(),
        number(2**31 - 1),
        rng.choice(list(TopicKind)),
        rng.choice(["b", "broker-a", "ä" * 20, "x" * 255]),
        number(2**31 - 1),
        rng.choice([None, number(INT64_MAX)]),
    )


@pytest.mark.parametrize("seed", seeds(40))
def test_handles_are_read_as_written(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        handle = some_handle(rng)
        assert parse(handle.text()) == handle, seed


@pytest.mark.parametrize("seed", seeds(40))
def test_any_text_is_a_handle_or_rejected_by_name(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        parts = list(HANDLE.text())
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(parts))
            parts[place] = rng.choice(["", " ", "-", "9" * 20, "٣", "\x01", parts[place] * 2])
        text = "".join(parts)
        handle = parsed(text)
        if isinstance(handle, OutOfBounds):
            assert "handle" in handle.remark, (seed, text)
            assert len(handle.remark) < 300
        else:
            assert min(n for n in handle if isinstance(n, int)) >= 0, (seed, text)


def parsed(text: str) -> Handle | OutOfBounds:
    try:
        return parse(text)
    except OutOfBounds as error:
        return error


PARTS = HANDLE.text().split(" ")
NUMBERS = {
    0: "start offset",
    1: "pop time",
    2: "invisible time",
    3: "revive queue",
    4: "kind of topic",
    6: "queue",
    7: "queue offset",
}


@pytest.mark.parametrize("wrong", ["-1", "+1", "", "x", "1.5", "٣", "1_0", str(2**63), "9" * 5000])
@pytest.mark.parametrize("place", NUMBERS)
def test_forged_numbers_are_rejected_by_name(place: int, wrong: str) -> None:
    text = " ".join([*PARTS[:place], wrong, *PARTS[place + 1 :]])
    expected = NUMBERS[place] if len(text) <= HANDLE_CHARS_MAX else f"a handle of {len(text)} char"
    with pytest.raises(OutOfBounds, match=expected) as caught:
        parse(text)
    assert caught.value.code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "1 parts, expected 7 to 9"),
        (" ".join(PARTS[:6]), "6 parts"),
        (" ".join([*PARTS, "1", "2"]), "10 parts"),
        ("x" * 10_000, "a handle of 10000 characters"),
        (HANDLE._replace(broker_name="").text(), "no broker's name"),
        (HANDLE._replace(broker_name="a\x1b[2Jb").text(), "no broker's name"),
        (HANDLE._replace(queue_id=2**31).text(), "queue '2147483648'"),
        (" ".join([*PARTS[:4], "3", *PARTS[5:]]), "kind of topic '3', expected 0 to 2"),
        (HANDLE._replace(invisible_time=INT64_MAX).text(), "never becomes visible"),
    ],
)
def test_forged_handles_are_rejected_by_name(text: str, reason: str) -> None:
    with pytest.raises(OutOfBounds, match=reason):
        parse(text)


def test_a_proxys_handle_has_a_physical_offset_too() -> None:
    assert parse(f"{HANDLE.text()} 12345") == HANDLE


def test_the_revive_queue_tells_of_order() -> None:
    assert not HANDLE.is_orderly
    assert HANDLE._replace(revive_queue_id=ORDER_REVIVE_QUEUE).is_orderly


# -- offsets in answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(40))
def test_infos_are_read_as_written(seed: int) -> None:
    rng = random.Random(seed)
    places = rng.sample([(kind, n) for kind in TopicKind for n in range(40)], POP_MESSAGES_MAX)
    queues = []
    for kind, queue_id in places[: rng.randint(0, POP_MESSAGES_MAX)]:
        start = rng.randrange(2**40)
        offsets = sorted(rng.sample(range(start, start + 100), rng.randint(1, 8)))
        queues.append(PoppedQueue(kind, queue_id, start, offsets))
    small = queues[:4]
    assert parse_offsets(*encode_offsets(small)) == small, seed
    counts = [
        OrderCount(kind, queue_id, rng.randrange(20), rng.choice([None, rng.randrange(2**40)]))
        for kind, queue_id, *_ in queues
    ]
    assert parse_order_counts(encode_order_counts(counts)) == counts, seed


def test_the_largest_answer_fits() -> None:
    queues = [
        PoppedQueue(TopicKind.RETRY_V2, 65_000 + n, INT64_MAX, [INT64_MAX])
        for n in range(POP_MESSAGES_MAX)
    ]
    assert parse_offsets(*encode_offsets(queues)) == queues
    one = [PoppedQueue(TopicKind.NORMAL, 65_000, 0, [INT64_MAX - n for n in range(32)])]
    assert parse_offsets(*encode_offsets(one)) == one


def test_no_infos_are_no_queues() -> None:
    assert parse_offsets(None, "") == []
    assert parse_order_counts(None) == []


@pytest.mark.parametrize(
    ("starts", "messages", "reason"),
    [
        ("0 1 0", "0 2 0", "differ in their queues"),
        ("0 1 0", None, "differ in their queues"),
        ("0 1", "0 1 0", "startOffsetInfo: '0 1' has 2 parts"),
        ("0 1 0", "0 1 0 0", "msgOffsetInfo: '0 1 0 0' has 4 parts"),
        ("3 1 0", "3 1 0", "kind of topic '3'"),
        ("0 1 0;0 1 0", "0 1 0", "startOffsetInfo names queue 1 twice"),
        ("0 -1 0", "0 -1 0", "queue '-1'"),
        ("0 65537 0", "0 65537 0", "queue '65537'"),
        ("0 1 -1", "0 1 0", "start offset '-1'"),
        ("0 1 0", "0 1 0,", "offset ''"),
        ("0 1 0", "0 1 0,٣", "offset '٣'"),
        ("x" * (INFO_CHARS_MAX + 1), "", "startOffsetInfo of 2049 characters"),
        (";" * 64, "", "65 queues in startOffsetInfo"),
    ],
)
def test_malformed_infos_are_rejected_by_name(starts: str, messages: str, reason: str) -> None:
    with pytest.raises(OutOfBounds, match=reason):
        parse_offsets(starts, messages)


@pytest.mark.parametrize("info", ["0 qo1 1", "0 qo1%x 1", "0 qo%1 1", "0 1 -1", "0 1"])
def test_malformed_counts_are_rejected(info: str) -> None:
    with pytest.raises(OutOfBounds):
        parse_order_counts(info)


# -- acks in batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(40))
def test_bits_are_read_as_written(seed: int) -> None:
    rng = random.Random(seed)
    bits = sorted(rng.sample(range(rng.choice([32, 500, BITS_MAX])), rng.randint(0, 32)))
    assert decode_bits(encode_bits(bits)) == bits, seed


def test_acks_of_one_queue_share_an_entry() -> None:
    handles = [HANDLE._replace(queue_id=n // 3, queue_offset=7 + n) for n in range(6)]
    acks = [
        BatchAck.of("T", "g", next(same), offsets)
        for key, same in groupby(handles, key=lambda each: each._replace(queue_offset=None))
        for offsets in [[h.queue_offset or 0 for h in handles if h.queue_id == key.queue_id]]
    ]
    assert [ack.offsets() for ack in acks] == [[7, 8, 9], [10, 11, 12]]
    assert [ack.handle("broker-a") for ack in acks] == [
        handles[0]._replace(queue_offset=None),
        handles[3]._replace(queue_offset=None),
    ]


@pytest.mark.parametrize("bits", ["gQI", "!!!!", "A" * 20_000])
def test_malformed_bits_are_rejected(bits: str) -> None:
    with pytest.raises(OutOfBounds, match="bits of acks"):
        BatchAck(bits=bits).offsets()


@pytest.mark.parametrize("bit", [-1, BITS_MAX])
def test_acks_too_far_apart_are_rejected(bit: int) -> None:
    with pytest.raises(OutOfBounds, match=f"bit {bit}"):
        encode_bits([bit])


@pytest.mark.parametrize(
    "ack",
    [
        BatchAck(start_offset=-1),
        BatchAck(pop_time=-1),
        BatchAck(invisible_time=-1),
        BatchAck(queue_id=-1),
        BatchAck(revive_queue_id=-1),
        BatchAck(retry="3"),
        BatchAck(retry=""),
    ],
)
def test_forged_acks_are_rejected(ack: BatchAck) -> None:
    with pytest.raises(OutOfBounds, match="negative number or no kind of topic"):
        ack.handle("b")


def test_a_batch_has_a_bound() -> None:
    BatchAckBody(acks=[BatchAck()] * ITEMS_MAX).check()
    with pytest.raises(OutOfBounds, match="10001 acks"):
        BatchAckBody(acks=[BatchAck()] * (ITEMS_MAX + 1)).check()


def test_codes_are_too_large_for_a_rocketmq_header() -> None:
    names = ("POP_MESSAGE", "ACK_MESSAGE", "PEEK_MESSAGE", "NOTIFICATION", "POLLING_INFO")
    assert [RequestCode[name].value for name in names] == [200050, 200051, 200052, 200054, 200055]


@pytest.mark.parametrize("topic", ["T", "%RETRY%g_T", "%RETRY%g+T"])
def test_a_retry_topic_says_where_its_messages_were_sent(topic: str) -> None:
    assert original_topic(topic, "g") == "T"
    assert original_topic(topic, "other") == topic
