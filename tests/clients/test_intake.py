"""Contents of a message, and what arrives of them: the same in every way to send."""

from __future__ import annotations

import array
import datetime as dt
import enum
import itertools
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace import HeadraceError, Message, Producer, Table
from headrace.consumer.subscription import Subscription, subscriptions_of
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError, InvalidMessage
from headrace.messages import Copy, SendResult
from headrace.received import ReceivedMessage
from headrace_protocol.compression import COMPRESSED
from tests.support.until import until

AnyMessage: Any = Message  # takes what a type checker would refuse
TOPIC = "Intake"


class State(str, enum.Enum):  # noqa: UP042 - formats as State.PAID
    PAID = "paid"


class Loud(str):
    """Formats, hashes and compares as something else."""

    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"

    __repr__ = __format__ = __str__  # type: ignore[assignment]

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return False

    def encode(self, *_: str) -> bytes:
        return b"LOUD"


class Raw(bytes, enum.Enum):
    BODY = b"body"


class Level(enum.IntEnum):
    THIRD = 3


class OwnBytes(bytes):
    def __bytes__(self) -> bytes:
        return b"other"


BODIES: list[Any] = [
    b"body",
    bytearray(b"body"),
    memoryview(b"body"),
    memoryview(b"b-o-d-y")[::2],
    OwnBytes(b"body"),
    Raw.BODY,
    np.bytes_(b"body"),
]
TEXTS = ["paid", State.PAID, Loud("paid"), np.str_("paid"), pd.Series(["paid"], dtype="string")[0]]
numbers = itertools.count()


# -- ways to send ----------------------------------------------------------------------------------

Way = Callable[[Producer, Any], Awaitable[object]]


async def _send(producer: Producer, message: Any) -> object:
    return await producer.send(message)


async def _pipeline(producer: Producer, message: Any) -> None:
    async with producer.pipeline() as pipeline:
        await pipeline.send(message)


async def _list(producer: Producer, message: Any) -> object:
    return await producer.send_many([message])


async def _iterator(producer: Producer, message: Any) -> object:
    return await producer.send_many(iter([message]))


async def _transaction(producer: Producer, message: Any) -> object:
    async with producer.transaction(message.topic) as transaction:
        return await transaction.send(message)


async def _columns(producer: Producer, message: Any) -> object:
    return await producer.send_many(
        [message.body], topic=message.topic, keys=[message.key], tags=[message.tag]
    )


async def _drawn_columns(producer: Producer, message: Any) -> object:
    return await producer.send_many(
        iter([message.body]), topic=message.topic, keys=iter([message.key]), tags=[message.tag]
    )


WAYS: dict[str, Way] = {
    "send": _send,
    "pipeline": _pipeline,
    "send_many of a list": _list,
    "send_many of an iterator": _iterator,
    "transaction": _transaction,
}
WAYS_OF_COLUMNS: dict[str, Way] = {
    **WAYS,
    "send_many of columns": _columns,
    "send_many of drawn columns": _drawn_columns,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
ways_of_columns = pytest.mark.parametrize("way", WAYS_OF_COLUMNS.values(), ids=WAYS_OF_COLUMNS)


async def new_topic(mq: Embedded) -> str:
    topic = f"T{next(numbers)}"
    async with mq.admin() as admin:
        await admin.create_topic(topic, queues=1)
    return topic


async def arrived(mq: Embedded, topic: str) -> list[ReceivedMessage]:
    """All messages of a topic of one queue."""
    messages: list[ReceivedMessage] = []
    async with headrace.PullConsumer(nameserver=mq.nameserver) as consumer:
        (queue,) = await consumer.queues(topic)
        await consumer.assign([queue])
        while len(messages) < await consumer.max_offset(queue):
            messages += await consumer.receive_many(timeout_ms=5000) or ()
    return messages


# -- what is taken ---------------------------------------------------------------------------------


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
async def test_a_body_arrives_as_its_bytes(mq: Embedded, body: Any) -> None:
    topic = await new_topic(mq)
    async with mq.producer() as producer:
        for way in WAYS_OF_COLUMNS.values():
            await way(producer, Message(topic, body, key="k"))
    async with Table(topic, nameserver=mq.nameserver, local=False) as table:
        await table.put("k", body)
    bodies = [message.body for message in await arrived(mq, topic)]
    assert bodies == [b"body"] * (len(WAYS_OF_COLUMNS) + 1)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: type(text).__name__)
async def test_a_text_arrives_as_its_characters(mq: Embedded, text: str) -> None:
    topic = await new_topic(mq)
    async with mq.producer() as producer:
        for way in WAYS.values():
            await way(producer, Message(topic, b"x", text, text, {text: text}))
        for way in (_columns, _drawn_columns):
            await way(producer, Message(topic, b"x", text, text))
    async with Table(topic, nameserver=mq.nameserver) as table:
        await table.put(text, b"x")
        assert await table.get(text) == table[text] == b"x"
        assert await table.get_many([text]) == {text: b"x"}
        assert (text in table, list(table)) == (True, ["paid"])
    found = [(m.key, m.tag, m.properties) for m in await arrived(mq, topic)]
    columns: tuple[str, str, dict[str, str]] = ("paid", "paid", {})
    assert found == [
        *[("paid", "paid", {"paid": "paid"})] * len(WAYS),
        *[columns] * 2,
        ("paid", "", {}),
    ]


async def test_a_topic_and_a_group_may_be_members_of_an_enum(mq: Embedded) -> None:
    topic = await new_topic(mq)
    names: Any = enum.Enum("names", {"TOPIC": topic, "GROUP": "readers"}, type=str)
    topic_name: Any = names["TOPIC"]
    group_name: Any = names["GROUP"]
    async with headrace.Producer(group_name, nameserver=mq.nameserver) as producer:
        for way in WAYS_OF_COLUMNS.values():
            await way(producer, AnyMessage(topic_name, b"x"))
    assert len(await arrived(mq, topic)) == len(WAYS_OF_COLUMNS)
    async with mq.consumer(group_name, {topic_name: "*"}) as consumer:
        async for message in consumer:
            assert message.topic == topic
            break


@pytest.mark.parametrize("absent", [None, ""])
async def test_a_key_or_tag_that_is_absent_is_none(mq: Embedded, absent: Any) -> None:
    topic = await new_topic(mq)
    async with mq.producer() as producer:
        for way in WAYS_OF_COLUMNS.values():
            await way(producer, Message(topic, b"x", key=absent, tag=absent))
    found = [(m.key, m.tag) for m in await arrived(mq, topic)]
    assert found == [("", "")] * len(WAYS_OF_COLUMNS)


@pytest.mark.parametrize("level", [3, Level.THIRD, np.int64(3), np.uint8(3)], ids=type)
def test_a_delay_level_is_any_integer(level: int) -> None:
    encoded = Message("T", b"x", delay_level=level).encoded()
    assert (encoded.properties, encoded.is_delayed) == (b"DELAY\x013\x02", True)


@pytest.mark.parametrize("delay", [2, 2.0, np.float32(2), np.int64(2), Fraction(4, 2)], ids=type)
def test_a_delay_is_any_number(delay: float) -> None:
    assert Message("T", b"x", delay=delay).encoded().properties == b"TIMER_DELAY_MS\x012000\x02"


@pytest.mark.parametrize(
    "at",
    [
        1_700_000_000_000,
        np.int64(1_700_000_000_000),
        pd.Timestamp(1_700_000_000, unit="s", tz="UTC"),
    ],
    ids=type,
)
def test_a_time_of_delivery_is_milliseconds_or_a_datetime(at: Any) -> None:
    properties = Message("T", b"x", deliver_at=at).encoded().properties
    assert properties == b"TIMER_DELIVER_MS\x011700000000000\x02"


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"body": "text"}, "body='text' is str, not bytes"),
    ({"body": 5}, "body=5 is int"),
    ({"body": None}, "body=None is NoneType"),
    ({"body": [1, 2]}, r"body=\[1, 2\] is list"),
    ({"body": array.array("b", [1])}, r"array\.array, not bytes; pass its tobytes"),
    ({"body": np.array([1])}, r"numpy\.ndarray, not bytes; pass its tobytes"),
    ({"body": np.int64(5)}, r"numpy\.int64, not bytes"),
    ({"body": b""}, "0 bytes"),
    ({"body": bytearray(4 * 1024 * 1024 + 1)}, "4194305 bytes"),
    ({"key": 5}, "key.*=5 is int"),
    ({"key": 0}, "key.*=0 is int"),
    ({"key": False}, "key.*=False is bool"),
    ({"key": b"k"}, "key.*=b'k' is bytes"),
    ({"key": float("nan")}, "key.*=nan is float"),
    ({"key": pd.NA}, "key.*=<NA> is pandas"),
    ({"key": np.array(["k"])}, r"key.*numpy\.ndarray"),
    ({"key": "\ud83d"}, r"key.*='\\ud83d' has a lone surrogate at character 1"),
    ({"key": "a\x01b"}, "key.*byte 1 or 2"),
    ({"tag": 5}, "tag.*=5 is int"),
    ({"tag": b"t"}, "tag.*=b't' is bytes"),
    ({"tag": "x\udc80"}, "tag.*lone surrogate at character 2"),
    ({"tag": "a\x02b"}, "tag.*byte 1 or 2"),
    ({"tag": "a||b"}, "tag='a||b' could never be selected"),
    ({"tag": "*"}, "selects all tags"),
    ({"tag": " x "}, "trimmed"),
    ({"tag": "x\n"}, "trimmed"),
    ({"tag": " "}, "trimmed"),
    ({"tag": "a > 5"}, "SQL92"),
    ({"tag": "a IS NOT NULL"}, "SQL92"),
    ({"topic": 5}, "5 is not a valid topic name"),
    ({"topic": None}, "None is not a valid topic name"),
    ({"topic": ["T"]}, "not a valid topic name"),
    ({"topic": "\ud83d"}, "not a valid topic name"),
]
BAD_MESSAGE_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"properties": [("a", "b")]}, r"properties=\[\('a', 'b'\)\] is list: it must be a dict"),
    ({"properties": "ab"}, "properties='ab' is str"),
    ({"properties": {"a": 5}}, "property 'a' = 5 is int"),
    ({"properties": {"a": None}}, "property 'a' = None is NoneType"),
    ({"properties": {"a": b"b"}}, "property 'a' = b'b' is bytes"),
    ({"properties": {5: "b"}}, "a property's name=5 is int"),
    ({"properties": {"": "b"}}, "may be empty"),
    ({"properties": {"a": ""}}, "may be empty"),
    ({"properties": {"a": "\ud83d"}}, r"property 'a'='\\ud83d' has a lone surrogate"),
    ({"properties": {"\ud83d": "b"}}, "a property's name=.* has a lone surrogate"),
    ({"properties": {"a": "b\x02"}}, "property 'a'=.*byte 1 or 2"),
    ({"properties": {Loud("TAGS"): "b"}}, "property TAGS is reserved"),
    ({"delay_level": "3"}, "delay_level='3' is str"),
    ({"delay_level": 3.0}, "delay_level=3.0 is float"),
    ({"delay_level": True}, "delay_level=True is bool"),
    ({"delay": "5s"}, "delay='5s' is str"),
    ({"delay": True}, "delay=True is bool"),
    ({"delay": dt.timedelta(1)}, "delay=.* is datetime.timedelta"),
    ({"delay": 10**400}, "seconds from now"),
    ({"deliver_at": 1.5}, "deliver_at=1.5 .*datetime or milliseconds"),
    ({"deliver_at": 2**63}, "deliver_at=.*datetime or milliseconds"),
    ({"deliver_at": True}, "deliver_at=True"),
    ({"deliver_at": np.datetime64("2026-01-01")}, "deliver_at="),
    ({"deliver_at": dt.datetime(2026, 1, 1)}, "needs a time zone"),  # noqa: DTZ001
]


@ways_of_columns
async def test_a_bad_field_is_the_error_of_its_call_alone(mq: Embedded, way: Way) -> None:
    topic = await new_topic(mq)
    bad = BAD_FIELDS if way in (_columns, _drawn_columns) else BAD_FIELDS + BAD_MESSAGE_FIELDS
    async with mq.producer() as producer:
        for fields, reason in bad:
            if way not in WAYS.values() and fields.get("topic", topic) is None:
                continue  # which means that the messages have topics of their own
            message = AnyMessage(**{"topic": topic, "body": b"x", **fields})
            with pytest.raises(InvalidMessage, match=reason):
                await way(producer, message)
        await way(producer, Message(topic, b"good"))
    assert [message.body for message in await arrived(mq, topic)] == [b"good"]


@pytest.mark.parametrize("way", [way for way in WAYS.values() if way is not _transaction])
@pytest.mark.parametrize("message", [b"x", None, "x", {"topic": "T", "body": b"x"}], ids=type)
async def test_only_a_message_is_a_message(mq: Embedded, way: Way, message: Any) -> None:
    async with mq.producer() as producer:
        with pytest.raises(InvalidMessage, match=r"no Message|not a Message"):
            await way(producer, message)


async def test_the_good_messages_of_a_pipeline_are_stored(mq: Embedded) -> None:
    topic = await new_topic(mq)
    outcomes: list[tuple[Any, Any]] = []
    async with (
        mq.producer() as producer,
        producer.pipeline(on_result=lambda *outcome: outcomes.append(outcome)) as pipeline,
    ):
        for fields, _ in BAD_FIELDS + BAD_MESSAGE_FIELDS:
            await pipeline.send(Message(topic, b"good"))
            await pipeline.send(AnyMessage(**{"topic": topic, "body": b"x", **fields}))
        await pipeline.send(b"no message")  # type: ignore[arg-type]
    count = len(BAD_FIELDS) + len(BAD_MESSAGE_FIELDS)
    errors = [outcome for _, outcome in outcomes if isinstance(outcome, InvalidMessage)]
    assert (len(errors), len(outcomes)) == (count + 1, 2 * count + 1)
    assert [message.body for message in await arrived(mq, topic)] == [b"good"] * count


texts = st.text(st.sampled_from("ab ü|*\x01\x02\x7f\ud83d"), max_size=4)


@pytest.mark.slow
@given(texts, texts, st.binary(max_size=2))
def test_the_short_ways_through_the_checks_agree_with_the_long_one(
    key: str, tag: str, body: bytes
) -> None:
    def outcome(text: type[str]) -> object:
        try:
            whole = Message("T", body, text(key), text(tag)).encoded()
        except InvalidMessage as error:
            return str(error)
        return whole.body, whole.properties, whole.key

    class Subclass(str):
        __slots__ = ()

    assert outcome(str) == outcome(Subclass)


# -- copies ----------------------------------------------------------------------------------------


def _reused() -> Iterator[tuple[int, Message]]:
    """Messages of one object, whose body, key and properties change each time."""
    body, properties = bytearray(2), {"n": ""}
    message = AnyMessage(TOPIC, body, properties=properties)
    for number in range(40):
        body[:] = b"%02d" % number
        properties["n"] = message.key = str(number)
        yield number, message


async def test_a_reused_message_arrives_as_it_was_each_time(mq: Embedded) -> None:
    async with mq.producer() as producer:
        first = await new_topic(mq)
        async with producer.pipeline() as pipeline:
            for _, message in _reused():
                message.topic = first
                await pipeline.send(message)
        second = await new_topic(mq)

        def drawn() -> Iterator[Message]:
            for _, message in _reused():
                message.topic = second
                yield message

        await producer.send_many(drawn())
    expected = [(b"%02d" % n, str(n), {"n": str(n)}) for n in range(40)]
    for topic in (first, second):
        assert [(m.body, m.key, m.properties) for m in await arrived(mq, topic)] == expected


async def test_a_reused_buffer_arrives_as_it_was_each_time(mq: Embedded) -> None:
    topic = await new_topic(mq)
    buffer = bytearray(2)

    def drawn() -> Iterator[Any]:
        for number in range(40):
            buffer[:] = b"%02d" % number
            yield buffer

    async with mq.producer() as producer:
        await producer.send_many(drawn(), topic=topic)
    assert [m.body for m in await arrived(mq, topic)] == [b"%02d" % n for n in range(40)]


async def test_failures_hold_what_was_sent(mq: Embedded) -> None:
    message = Message("Nowhere", b"0", key="k", tag="t", properties={"a": "0"})
    kept = Message("Nowhere", b"kept")
    encoded, of_kept = message.encoded(), kept.encoded()
    message.body, message.properties["a"] = b"1", "1"
    assert encoded.as_sent() == Message("Nowhere", b"0", "k", "t", {"a": "0"})
    assert of_kept.as_sent() is kept
    delays: list[dict[str, Any]] = [{"delay": 2.5}, {"delay_level": 3}, {"deliver_at": 10**12}]
    for delay in delays:
        message = Message("T", b"0", **delay)
        encoded = message.encoded()
        message.body = b"1"
        assert encoded.as_sent() == Message("T", b"0", **delay)


async def test_a_list_that_changes_while_it_is_sent(mq: Embedded) -> None:
    topic = await new_topic(mq)
    bodies = [b"x"] * 70_000

    async def clear() -> None:
        bodies.clear()

    async with mq.producer() as producer, trio.open_nursery() as nursery:
        nursery.start_soon(clear)
        results = await producer.send_many(bodies, topic=topic)
    assert sum(result.message_count for result in results) == 70_000


# -- subscriptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("*", set()),
        ("", set()),
        (" * ", set()),
        ("a", {"a"}),
        (" a || b|| ", {"a", "b"}),
        ("a|b", {"a|b"}),
        ("rock and roll || not in stock", {"rock and roll", "not in stock"}),
        ("\u00a0x", {"\u00a0x"}),
        (State.PAID, {"paid"}),
    ],
)
def test_a_subscription_selects_the_tags_that_it_lists(expression: str, tags: set[str]) -> None:
    assert Subscription("T", expression).tags == tags
    for tag in tags:
        Message("T", b"x", tag=tag).check()


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("||", "lists no tag"),
        (" || || ", "lists no tag"),
        ("* || a", "cannot be listed"),
        ("* || *", "cannot be listed"),
        ("a > 5", "SQL92"),
        ("a in ('x')", "SQL92"),
        ("a IS NULL", "SQL92"),
        ("a between 1 and 2", "SQL92"),
        ("\ud83d", "lone surrogate"),
        (5, "must be a str"),
        (None, "must be a str"),
    ],
)
def test_a_subscription_that_selects_nothing_is_refused(expression: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Subscription("T", expression)


@pytest.mark.parametrize(
    ("tags", "sql", "reason"),
    [
        ("*", "a >", r"line 1, column 4: expected a property"),
        ("*", "", "it is empty"),
        ("a || b", "a > 5", r"write TAGS IN \('a', 'b'\) in the filter"),
        ("*", 5, "must be a str"),
        ("*", "a = '\ud83d'", "lone surrogate"),
    ],
)
def test_a_filter_that_cannot_be_used_is_refused(tags: str, sql: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Subscription("T", tags, sql)


def test_filters_of_topics() -> None:
    """One for all, or one for each, beside topics with tags."""
    both = subscriptions_of("g", ["T", "U"], "a > 5")
    assert [(each.topic, each.kind, each.expression) for each in both] == [
        ("T", "SQL92", "a > 5"),
        ("U", "SQL92", "a > 5"),
    ]
    some = subscriptions_of("g", {"T": "x", "U": "*"}, {"U": "a > 5"})
    assert [(each.kind, each.data().expression_type) for each in some] == [
        ("TAG", "TAG"),
        ("SQL92", "SQL92"),
    ]
    with pytest.raises(ConfigurationError, match="does not subscribe to 'V'"):
        subscriptions_of("g", "T", {"V": "a > 5"})


@given(st.text(st.sampled_from("ab *|>\t\u00a0\u2003"), max_size=6))
def test_each_tag_that_is_taken_can_be_selected(tag: str) -> None:
    try:
        Message("T", b"x", tag=tag).check()
    except InvalidMessage:
        return
    assert Subscription("T", tag).tags == ({tag} if tag else set())


# -- compression -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [4096, 100_000, pytest.param(4 * 1024 * 1024, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_compressible", [True, False])
async def test_only_what_gets_smaller_is_compressed(
    mq: Embedded, size: int, is_compressible: bool
) -> None:
    topic = await new_topic(mq)
    body = bytes(size) if is_compressible else Random(1).randbytes(size)
    async with mq.producer() as producer:
        for way in WAYS.values():
            await way(producer, Message(topic, body, key="k"))
    async with Table(topic, nameserver=mq.nameserver, local=False) as table:
        await table.put("k", body)
    messages = await arrived(mq, topic)
    assert [message.body for message in messages] == [body] * (len(WAYS) + 1)
    for message in messages:
        is_compressed = bool(message.stored.sys_flag & COMPRESSED)
        assert is_compressed == (len(message.stored.stored_body) < size)
        assert len(message.stored.stored_body) <= size


# -- callbacks that raise --------------------------------------------------------------------------


class Faulty:
    """An ``on_result`` that raises for some bodies."""

    def __init__(self, *bad: bytes) -> None:
        self.bad = bad
        self.seen: list[bytes] = []

    def __call__(self, message: Message, _result: SendResult | HeadraceError) -> None:
        self.seen.append(message.body)
        if message.body in self.bad:
            raise ZeroDivisionError(message.body)


async def test_an_error_of_on_result_is_raised_once_and_costs_nothing_else(mq: Embedded) -> None:
    topic = await new_topic(mq)
    on_result = Faulty(b"1", b"3", b"4")
    async with mq.producer() as producer:
        with pytest.raises(ZeroDivisionError, match="1") as caught:
            async with producer.pipeline(on_result=on_result) as pipeline:
                await pipeline.send_all(Message(topic, b"%d" % n) for n in range(20))
        assert caught.value.__notes__ == ["on_result raised for 2 more messages"]
        await producer.send(Message(topic, b"last"))
    assert sorted(on_result.seen) == sorted(b"%d" % n for n in range(20))
    assert len(await arrived(mq, topic)) == 21


async def test_a_send_raises_an_error_of_on_result_and_the_pipeline_goes_on(mq: Embedded) -> None:
    topic = await new_topic(mq)
    on_result = Faulty(b"0")
    sent: list[bytes] = []
    async with mq.producer() as producer, producer.pipeline(on_result=on_result) as pipeline:
        for number in range(10):
            body = b"%d" % number
            try:
                await pipeline.send(Message(topic, body))
            except ZeroDivisionError:
                assert sent == [b"0"]
            else:
                sent.append(body)
            await until(lambda: on_result.seen == sent)
    assert sent == [b"0", *(b"%d" % n for n in range(2, 10))]


async def test_the_block_that_an_error_of_on_result_ends_sends_what_it_accepted(
    mq: Embedded,
) -> None:
    topic = await new_topic(mq)
    on_result = Faulty(b"0")
    drawn: list[Message] = []

    def messages() -> Iterator[Message]:
        for number in itertools.count():
            drawn.append(Message(topic, b"%d" % number))
            yield drawn[-1]

    async with mq.producer() as producer:
        with pytest.raises(ZeroDivisionError):
            async with producer.pipeline(on_result=on_result) as pipeline:
                await pipeline.send_all(messages())
    # The send of the last one raised the error.
    assert len(on_result.seen) == len(drawn) - 1 == len(await arrived(mq, topic))


async def test_an_error_of_on_result_about_a_bad_message_is_raised(mq: Embedded) -> None:
    topic = await new_topic(mq)
    async with mq.producer() as producer:
        with pytest.raises(ZeroDivisionError):
            async with producer.pipeline(on_result=Faulty(b"")) as pipeline:
                await pipeline.send_all([Message(topic, b"good"), Message(topic, b"")])
    assert [message.body for message in await arrived(mq, topic)] == [b"good"]


async def test_an_error_of_on_result_after_another_exception_is_logged(
    mq: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await new_topic(mq)
    async with mq.producer() as producer:
        await producer.send(Message(topic, b"x"))
        pipeline = await producer.pipeline(on_result=Faulty(b"y")).__aenter__()
        await pipeline.send(Message(topic, b"y"))
        await pipeline.__aexit__(KeyError, KeyError(), None)
    (record,) = [record for record in caplog.records if record.message == "on_result failed"]
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize(
    ("on_result", "reason"), [(5, "on_result=5 is no function"), (_send, "async function")]
)
async def test_what_cannot_be_called_with_results(
    mq: Embedded, on_result: Any, reason: str
) -> None:
    async with mq.producer() as producer:
        with pytest.raises(ConfigurationError, match=reason):
            producer.pipeline(on_result=on_result)


# -- copies of messages of other clients -----------------------------------------------------------


@pytest.mark.parametrize("tag", [" x ", "a||b", "*", "a > 5"])
@ways
async def test_a_copy_keeps_a_tag_that_another_client_gave(
    mq: Embedded, way: Way, tag: str
) -> None:
    topic, other = await new_topic(mq), await new_topic(mq)
    async with mq.producer() as producer:
        await producer.send(Copy(topic, b"x", "k", tag, {"a": "b"}))
        (received,) = await arrived(mq, topic)
        await way(producer, received.copy_to(other))
    (copied,) = await arrived(mq, other)
    assert (copied.key, copied.tag, copied.properties) == ("k", tag, {"a": "b"})
