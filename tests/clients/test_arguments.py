"""Arguments of a wrong type are an error of their call; what is like a number is one."""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import Consumer, Message, Producer, PullConsumer
from headrace.consumer.strategies import averagely
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError, InvalidMessage, StrategyFailed
from headrace.producer.transaction import Checks
from headrace_protocol.bodies import MessageQueue
from tests.support.until import until


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with headrace.embedded() as running:
        with headrace.blocking.Producer(nameserver=running.nameserver) as producer:
            producer.send_many([b"%d" % n for n in range(5)], topic="T")
        yield running


class Two(enum.IntEnum):
    TWO = 2


class Start(str, enum.Enum):  # noqa: UP042 - formats as Start.EARLIEST
    EARLIEST = "earliest"


@pytest.fixture
async def consumer(mq: Embedded) -> AsyncIterator[tuple[Any, MessageQueue]]:
    async with PullConsumer("pullers", nameserver=mq.nameserver) as consumer:
        queues = await consumer.queues("T")
        await consumer.assign(queues)
        ends = {queue: await consumer.max_offset(queue) for queue in queues}
        yield consumer, max(ends, key=ends.__getitem__)


@pytest.mark.parametrize("offset", [np.int64(2), np.uint8(2), Two.TWO])
async def test_an_offset_is_any_integer(consumer: tuple[Any, MessageQueue], offset: int) -> None:
    client, queue = consumer
    await client.assign([queue])
    client.seek(queue, offset)
    batch = await client.receive_many(max_messages=np.int64(1), timeout_ms=np.float64(5000))
    assert batch.values() == [b"2"]
    await client.commit({queue: offset})
    assert await client.committed(queue) == 2
    assert await client.offset_at(queue, np.int64(0)) == 0


async def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method that may be async."""
    outcome = method(*arguments, **named)
    return await outcome if inspect.isawaitable(outcome) else outcome


async def test_arguments_of_wrong_types_cost_nothing(consumer: tuple[Any, MessageQueue]) -> None:
    client, queue = consumer
    bad: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (client.seek, (queue, "2"), {}, "offset='2' is str"),
        (client.seek, (queue, 2.0), {}, "offset=2.0 is float"),
        (client.seek, (queue, None), {}, "offset=None is NoneType"),
        (client.seek, (queue, True), {}, "offset=True is bool"),
        (client.seek, (queue, 2**63), {}, "must be less than"),
        (client.seek, ("T", 2), {}, "queue='T' is str: give a MessageQueue"),
        (client.seek, ([queue], 2), {}, "is list: give a MessageQueue"),
        (client.position, (0,), {}, "queue=0 is int"),
        (client.seek_to, ("newest",), {}, "start='newest': must be"),
        (client.seek_to, ([],), {}, r"start=\[\]: must be"),
        (client.seek_to, (True,), {}, "start=True: must be"),
        (client.seek_to, (1.5,), {}, "start=1.5: must be"),
        (client.receive_many, (), {"max_messages": "5"}, "max_messages='5' is str"),
        (client.receive_many, (), {"max_messages": 1.5}, "max_messages=1.5 is float"),
        (client.receive_many, (), {"max_messages": 0}, "max_messages=0: must be at least 1"),
        (client.receive_many, (), {"timeout_ms": "5"}, "timeout_ms='5' is str"),
        (client.commit, ({queue: "2"},), {}, "offset='2' is str"),
        (client.commit, ({0: 2},), {}, "queue=0 is int"),
        (client.committed, ("T",), {}, "queue='T' is str"),
        (client.min_offset, ("T",), {}, "queue='T' is str"),
        (client.max_offset, (None,), {}, "queue=None"),
        (client.offset_at, (queue, "now"), {}, "timestamp_ms='now' is str"),
        (client.assign, (["T"],), {}, "queue='T' is str"),
        (client.assign, ([queue],), {"tags": "||"}, "lists no tag"),
        (client.assign, ([queue],), {"tags": 5}, "tags=5"),
    ]
    for method, positional, named, reason in bad:
        with pytest.raises(ConfigurationError, match=reason):
            await call(method, *positional, **named)
    with pytest.raises(InvalidMessage, match="5 is not a valid topic name"):
        await client.queues(5)
    client.seek(queue, -5)
    batch = await client.receive_many(timeout_ms=5000)
    assert batch


@pytest.mark.parametrize("start", [Start.EARLIEST, np.int64(0)])
async def test_a_start_is_a_member_of_an_enum_or_any_integer(mq: Embedded, start: Any) -> None:
    async with Consumer(
        f"g{type(start).__name__}", "T", nameserver=mq.nameserver, start=start
    ) as c:
        async for message in c:
            assert message.queue_offset == 0
            break


@pytest.mark.parametrize(
    ("client", "arguments", "options", "reason"),
    [
        (Producer, [5], {}, "group=5 is int"),
        (Producer, [], {"on_check": 5}, "on_check=5 is no function"),
        (Producer, [], {"timeout_ms": "5"}, "timeout_ms='5' is str"),
        (Producer, [], {"timeout_ms": float("nan")}, "timeout_ms=nan"),
        (Producer, [], {"compress_from_bytes": "big"}, "compress_from_bytes='big'"),
        (Consumer, [None, "T"], {}, "group=None"),
        (Consumer, ["g", "T"], {"start": []}, "start="),
        (Consumer, ["g", "T"], {"max_attempts": "3"}, "max_attempts='3'"),
        (Consumer, ["g", "T"], {"retry_delay": "3"}, "retry_delay='3' is str"),
        (Consumer, ["g", {"T": 5}], {}, "tags=5"),
        (PullConsumer, [5], {}, "group=5 is int"),
        (headrace.Table, ["T"], {"timeout_ms": "5"}, "timeout_ms='5' is str"),
    ],
)
def test_settings_of_wrong_types_are_refused(
    client: Any, arguments: list[Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        client(*arguments, **options)


@pytest.mark.parametrize("queue", [5, "T", ("T", "broker-a", 0)], ids=type)
async def test_a_queue_to_send_to_is_a_queue(mq: Embedded, queue: Any) -> None:
    async with mq.producer() as producer:
        with pytest.raises(ConfigurationError, match="give a MessageQueue"):
            await producer.send(Message("T", b"x"), queue=queue)
        with pytest.raises(ConfigurationError, match="give a MessageQueue"):
            await producer.send_many([Message("T", b"x")], queue=queue)


@pytest.mark.parametrize("key", [5, None, b"k", "\ud83d"], ids=type)
async def test_a_key_of_a_table_is_text(mq: Embedded, key: Any) -> None:
    for local in (True, False):
        async with headrace.Table("T", nameserver=mq.nameserver, local=local) as table:
            for call in (table.get(key), table.get_many([key]), table.delete(key)):
                with pytest.raises(ConfigurationError, match="key="):
                    await call
            with pytest.raises(ConfigurationError, match="key="):
                await table.put(key, b"x")


# -- functions of the program ----------------------------------------------------------------------


class Faulty:
    """A strategy that fails while it is told to."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.calls = 0

    def __call__(
        self, queues: Sequence[MessageQueue], client_ids: Sequence[str], client_id: str
    ) -> Sequence[MessageQueue]:
        self.calls += 1
        if self.fails:
            raise ZeroDivisionError("a bug of the strategy")
        return averagely(queues, client_ids, client_id)


@pytest.mark.parametrize("strategy", [Faulty(fails=True), lambda *_: None, lambda *_: 5])
async def test_a_strategy_that_fails_at_the_start_is_an_error(mq: Embedded, strategy: Any) -> None:
    with pytest.raises(StrategyFailed, match=r"ZeroDivisionError|TypeError") as caught:
        async with Consumer("faulty", "T", nameserver=mq.nameserver, strategy=strategy):
            pass
    assert isinstance(caught.value.__cause__, ZeroDivisionError | TypeError)


async def test_a_strategy_that_fails_later_costs_no_queue(
    mq: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = Faulty(fails=False)
    async with Consumer("later", "T", nameserver=mq.nameserver, strategy=strategy) as consumer:
        before = consumer.assignment
        strategy.fails, calls = True, strategy.calls
        async with Consumer("later", "T", nameserver=mq.nameserver):
            await until(lambda: strategy.calls > calls)
            assert consumer.assignment == before != []
        async for message in consumer:
            assert message.topic == "T"
            break
    assert [each for each in caplog.messages if "a bug of the strategy" in each]


@pytest.mark.parametrize("answer", ["commit", 1, np.True_, ZeroDivisionError("a bug")], ids=type)
async def test_an_answer_of_on_check_that_is_none_decides_nothing(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_check(_message: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    # Nothing is sent: the connection is not even looked at.
    await Checks("g", on_check)._answer(None, None, None)  # type: ignore[arg-type]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "undecided" in record.message
