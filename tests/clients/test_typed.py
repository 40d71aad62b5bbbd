"""Typed topics: values as bodies in both forms, and what happens to bodies that are none."""

from __future__ import annotations

import dataclasses
import pickle
from itertools import count
from typing import Any

import anyio
import msgspec
import pydantic
import pytest

from headrace import (
    Admin,
    Consumer,
    Message,
    Producer,
    PullConsumer,
    ReceivedMessage,
    SimpleConsumer,
    Topic,
    blocking,
)
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError, InvalidMessage, InvalidValue
from headrace_protocol.message import decode_record, encode_properties, encode_record

_numbers = count()


class Order(msgspec.Struct):
    number: int
    paid: bool = False


class Payment(pydantic.BaseModel):
    amount: float
    note: str = ""


class Aliased(pydantic.BaseModel):
    in_cents: int = pydantic.Field(alias="inCents")


@dataclasses.dataclass
class Parcel:
    weight: int


VALUES = [
    *(Order(5, True), Payment(amount=1.5, note="ä"), Aliased(inCents=7), Parcel(3)),
    *({"a": [1, 2]}, "text", b"\0"),
]


def received(message: Message, **properties: str) -> ReceivedMessage:
    """A message as a consumer reads it."""
    own = {"KEYS": message.key, "TAGS": message.tag, **message.properties, **properties}
    raw = encode_properties({name: text for name, text in own.items() if text})
    stored = encode_record(topic=message.topic, queue_id=0, body=message.body, properties=raw)
    return ReceivedMessage.from_stored(decode_record(stored), "b")


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_read_as_they_were_sent(value: Any, form: Any) -> None:
    topic = Topic("orders", type(value), form=form, version="2")
    message = topic.message(value, key="k", tag="t", properties={"mine": "1"}, delay=3)
    assert (message.topic, message.key, message.tag, message.delay) == ("orders", "k", "t", 3)
    name = {"str": "text"}.get(type(value).__name__, type(value).__name__)
    assert message.properties == {"mine": "1", "type": name, "version": "2"}
    assert topic.read(received(message)) == value


def test_forms_differ() -> None:
    json, packed = (Topic("orders", Order, form=form) for form in ("json", "msgpack"))
    assert json.message(Order(5)).body == b'{"number":5,"paid":false}'
    assert packed.message(Order(5)).body == msgspec.msgpack.encode(Order(5))
    with pytest.raises(InvalidValue, match="orders is not valid Order"):
        json.read(received(packed.message(Order(5))))


def test_a_topic_is_its_name() -> None:
    topic = Topic("orders", Order, form="msgpack", version="2")
    assert topic == "orders"
    assert {topic: 1} == {"orders": 1}
    copy = pickle.loads(pickle.dumps(topic))
    assert (copy, copy.model, copy.form, copy.version) == ("orders", Order, "msgpack", "2")
    assert Message(topic, b"x").encoded().topic == "orders"


def test_messages_without_a_type_are_read_too() -> None:
    message = Message("orders", b'{"number":7}')
    assert Topic("orders", Order).read(received(message)) == Order(7)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("orders", b"{", key="k1"), "key 'k1' in topic orders is not valid Order"),
        (Message("orders", b'{"number":"x"}'), "number"),
        (Topic("orders", Parcel).message(Parcel(1)), "its type is 'Parcel'"),
    ],
)
def test_a_body_that_does_not_fit_is_an_error(message: Message, reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason):
        Topic("orders", Order).read(received(message))


def test_a_body_that_can_not_be_read_is_an_error() -> None:
    stored = encode_record(topic="orders", queue_id=0, body=b"x" * 100, sys_flag=0x301)
    message = ReceivedMessage.from_stored(decode_record(stored), "b")
    with pytest.raises(InvalidValue, match="does not decompress"):
        Topic("orders", Order).read(message)


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("model", [Payment, Order, Parcel])
def test_a_value_of_another_type_is_not_sent(model: type[Any], form: Any) -> None:
    with pytest.raises(InvalidValue, match="a value is dict"):
        Topic("payments", model, form=form).message({"number": 5})


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (("a b", Order), InvalidMessage, "not a valid topic name"),
        (("orders", 5), ConfigurationError, "model=5"),
        (("orders", Order, "xml"), ConfigurationError, "form='xml'"),
    ],
)
def test_unsuitable_topics_are_rejected(arguments: Any, error: Any, reason: str) -> None:
    name, model, *form = arguments
    with pytest.raises(error, match=reason):
        Topic(name, model, **({"form": form[0]} if form else {}))


# -- consumers -------------------------------------------------------------------------------------


@pytest.fixture
def topic(mq: Embedded) -> Topic[Order]:
    """A topic of the test's own: an order, something else, and another order."""
    topic = Topic(f"typed_{next(_numbers)}", Order)
    with (
        blocking.Admin(nameserver=mq.nameserver) as admin,
        blocking.Producer(nameserver=mq.nameserver) as producer,
    ):
        admin.create_topic(topic, queues=1)
        producer.send(topic.message(Order(1)))
        producer.send(Message(topic, b"no order"))
        producer.send(topic.message(Order(2)))
    return topic


async def dead_letters(nameserver: str, group: str) -> list[bytes]:
    async with PullConsumer(nameserver=nameserver) as reader:
        await reader.assign(await reader.queues(f"%DLQ%{group}"))
        return [message.body for message in await reader.receive_many(timeout_ms=5000) or ()]


@pytest.mark.parametrize("options", [{"max_attempts": 1}, {"ordered": True}])
async def test_what_is_no_value_goes_to_the_dead_letters(
    mq: Embedded, topic: Topic[Order], options: Any
) -> None:
    group = f"g_{topic}"
    async with Consumer(group, topic, nameserver=mq.nameserver, **options) as consumer:
        values = consumer.values()
        with anyio.fail_after(20):
            assert [(await anext(values))[0] for _ in range(2)] == [Order(1), Order(2)]
    assert await dead_letters(mq.nameserver, group) == [b"no order"]


async def test_a_program_handles_what_is_no_value(mq: Embedded, topic: Topic[Order]) -> None:
    bad: list[tuple[str, bytes]] = []

    def on_bad(error: InvalidValue, message: ReceivedMessage) -> None:
        bad.append((str(error), message.body))

    async def on_bad_later(error: InvalidValue, message: ReceivedMessage) -> None:
        on_bad(error, message)

    for number, function in enumerate((on_bad, on_bad_later)):
        group = f"g{number}_{topic}"
        # The model of a plain name.
        async with Consumer(
            group, [str(topic)], model=Order, on_bad=function, nameserver=mq.nameserver
        ) as consumer:
            values = consumer.values()
            with anyio.fail_after(20):
                assert [(await anext(values))[0] for _ in range(2)] == [Order(1), Order(2)]
    assert [body for _, body in bad] == [b"no order"] * 2
    assert f"topic {topic} is not valid Order" in bad[0][0]


async def test_simple_consumers_have_values(mq: Embedded, topic: Topic[Order]) -> None:
    group = f"g_{topic}"
    async with SimpleConsumer(group, {topic: "*"}, nameserver=mq.nameserver) as consumer:
        found = await consumer.receive_values(wait=5)
        assert [value for value, _ in found] == [Order(1), Order(2)]
        await consumer.ack([message for _, message in found])


async def test_a_body_that_is_too_large_is_left_to_the_program(mq: Embedded) -> None:
    topic = Topic(f"typed_{next(_numbers)}", Order)
    async with Admin(nameserver=mq.nameserver) as admin:
        await admin.create_topic(topic, queues=1)
    async with Producer(nameserver=mq.nameserver) as producer:
        await producer.send(Message(topic, b"{" + b" " * 100_000 + b"}"))
        await producer.send(topic.message(Order(1)))
    reasons: list[str] = []

    async def on_bad(error: InvalidValue, message: ReceivedMessage) -> None:
        reasons.append(str(error))
        await message.reject()

    how: Any = {"nameserver": mq.nameserver, "body_bytes_max": 99_999, "on_bad": on_bad}
    async with Consumer(f"g_{topic}", topic, **how) as consumer:
        with anyio.fail_after(20):
            assert (await anext(consumer.values()))[0] == Order(1)
    async with SimpleConsumer(f"s_{topic}", topic, **how) as simple:
        with anyio.fail_after(20):
            while not (found := await simple.receive_values(wait=5)):
                pass
        assert [value for value, _ in found] == [Order(1)]
        assert await simple.receive_values(wait=0) == []
    assert len(reasons) == 2
    for reason in reasons:
        assert f"{topic}/broker-a/0@0: a ZLIB body of" in reason


def test_blocking_consumers_have_values(mq: Embedded, topic: Topic[Order]) -> None:
    bad = []
    with blocking.Consumer(
        "g", topic, on_bad=lambda _, message: bad.append(message.body), nameserver=mq.nameserver
    ) as consumer:
        values = consumer.values()
        assert [next(values)[0] for _ in range(2)] == [Order(1), Order(2)]
    assert bad == [b"no order"]
    with blocking.SimpleConsumer("h", topic, nameserver=mq.nameserver) as simple:
        found = simple.receive_values(wait=5)
        assert [value for value, _ in found] == [Order(1), Order(2)]
        # The third is retried, which the default does in this thread.
        simple.ack([message for _, message in found])


def test_a_table_takes_a_topics_model(mq: Embedded) -> None:
    topic = Topic(f"typed_{next(_numbers)}", Order, form="msgpack")
    with (
        blocking.Admin(nameserver=mq.nameserver) as admin,
        blocking.Producer(nameserver=mq.nameserver) as producer,
    ):
        admin.create_topic(topic, queues=1, attributes={"cleanup.policy": "COMPACTION"})
        producer.send(topic.message(Order(4), key="k"))
    with blocking.Table(topic, nameserver=mq.nameserver) as table:
        table.synced()
        assert table["k"] == Order(4)
        table.put("k", Order(3))
        assert table.get("k") == Order(3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"topics": "T", "on_bad": print}, "on_bad= requires a model="),
        ({"topics": "T", "model": Order, "on_bad": 5}, "on_bad=5 is no function"),
        ({"topics": "T", "model": Order, "broadcast": True}, "requires on_bad="),
        ({"topics": "T", "model": 5}, "model=5"),
    ],
)
def test_settings_that_can_not_work_are_rejected(options: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Consumer("g", **options)


async def test_a_topic_without_a_model_has_no_values(mq: Embedded, topic: Topic[Order]) -> None:
    async with Consumer(f"g_{topic}", str(topic), nameserver=mq.nameserver) as consumer:
        with pytest.raises(ConfigurationError, match=f"topic {topic} has no model"):
            await anext(consumer.values())
