"""Messages returned to their group: retries after a delay, attempts and dead letters."""

from __future__ import annotations

import time

import pytest
import trio

from headrace import Consumer, Message, PullConsumer, ReceivedMessage
from headrace.delays import LEVELS_S, level_of
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError
from headrace_protocol.codes import RequestCode
from headrace_protocol.serving import Reply
from tests.support.fixtures import in_memory
from tests.support.member import NO_TOPIC, Apache, Member
from tests.support.scripted import Asked
from tests.support.verbs import produce, take, take_nothing

LEVEL_1_S = 1.0


mq = pytest.fixture(in_memory)


async def one(consumer: Consumer) -> ReceivedMessage:
    async for message in consumer:
        return message
    raise AssertionError("the consumer is closed")


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1.0, 0.5])
async def test_the_first_retry_comes_after_its_delay_and_not_much_later(
    mq: Embedded, after: float
) -> None:
    await produce(mq, 1, queues=1)
    async with mq.consumer("g", "T") as consumer:
        message = await one(consumer)
        await message.retry(after=after)
        started = time.monotonic()
        with trio.fail_after(10):
            again = await one(consumer)
        seconds = time.monotonic() - started
    assert (again.body, again.topic, again.reconsume_times) == (b"0", "T", 1)
    assert again.queue.topic == "%RETRY%g"
    # Usually 5 ms late, but other tests run beside this one.
    assert LEVEL_1_S - 0.1 < seconds < LEVEL_1_S + 1


async def test_other_messages_do_not_wait_for_a_retry(mq: Embedded) -> None:
    await produce(mq, 5, queues=1)
    async with mq.consumer("g", "T", retry_delay=1) as consumer:
        seen = []
        async for message in consumer:
            seen.append(int(message.body))
            if seen == [0]:
                await message.retry()
            if len(seen) == 6:
                break
    assert seen == [0, 1, 2, 3, 4, 0]


async def test_a_message_of_a_batch_is_retried(mq: Embedded) -> None:
    await produce(mq, 3, queues=1)
    async with mq.consumer("g", "T", retry_delay=1) as consumer:
        batches = consumer.batches(max_messages=2)
        first = await anext(batches)
        await first[1].retry()
        assert (await anext(batches)).values() == [b"2"]
        assert (await anext(batches)).values() == [b"1"]


async def test_the_last_attempt_and_a_rejection_make_dead_letters(mq: Embedded) -> None:
    await produce(mq, 2, queues=1)
    async with mq.consumer("g", "T", max_attempts=2, retry_delay=1) as consumer:
        seen = []
        async for message in consumer:
            seen.append((int(message.body), message.reconsume_times))
            await (message.retry() if message.body == b"0" else message.reject())
            if len(seen) == 2:  # the first dead letter is there at once, and so is its topic
                async with PullConsumer(nameserver=mq.nameserver, connect=mq.connect) as reader:
                    assert len(await reader.queues("%DLQ%g")) == 1
            if len(seen) == 3:
                break
    assert seen == [(0, 0), (1, 0), (0, 1)]
    async with mq.consumer("undertaker", "%DLQ%g") as consumer:
        assert sorted(await take(consumer, 2)) == [0, 1]
        await take_nothing(consumer)


async def test_an_ordered_consumer_rejects_a_message(mq: Embedded) -> None:
    await produce(mq, 3, queues=1)
    async with mq.consumer("g", "T", ordered=True, retry_delay=0.02) as consumer:
        seen = []
        async for message in consumer:
            seen.append(int(message.body))
            if seen == [0]:
                await message.retry()
            elif message.body == b"0":
                await message.reject()
            if len(seen) == 4:
                break
    assert seen == [0, 0, 1, 2]
    async with mq.consumer("undertaker", "%DLQ%g") as consumer:
        assert await take(consumer, 1) == [0]


async def test_a_message_that_no_group_reads_cannot_be_returned(mq: Embedded) -> None:
    async with mq.producer() as producer, mq.admin() as admin:
        sent = await producer.send(Message("T", b"x"))
        message = await admin.message(sent.offset_message_id)
    assert message
    with pytest.raises(ConfigurationError, match="was not read by a Consumer"):
        await message.retry()
    with pytest.raises(ConfigurationError, match="was not read by a Consumer"):
        await message.reject()


@pytest.mark.parametrize("registered_after_s", [2, 67])
async def test_the_retry_topic_is_found_soon_after_its_broker_registers_it(
    registered_after_s: float, autojump_clock: object
) -> None:
    async with Member(Apache()) as member:
        started = trio.current_time()
        (only_route,) = [
            answer(Asked(0, {"topic": "T"}, b"", False, None))  # type: ignore[arg-type]
            for answer in member.routes.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC]
        ]

        def routes(asked: Asked) -> Reply:
            is_known = asked.ext["topic"] == "T" or registered_at <= trio.current_time()
            return only_route if is_known else NO_TOPIC

        registered_at = started + registered_after_s
        member.routes.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, routes)
        async with member.consumer as consumer:
            if registered_after_s > 30:
                await trio.sleep_until(registered_at - 0.5)
                await (await one(consumer)).retry()
            while len(consumer.assignment) < 2:  # noqa: ASYNC110 - no event tells of it
                await trio.sleep(0.1)
            assert 0 <= trio.current_time() - registered_at <= 1.2


@pytest.mark.parametrize(
    ("ordered", "delay", "allowed"),
    [
        (False, 0, "more than 0 to 7200 seconds for a consumer"),
        (False, -1, "more than 0 to 7200 seconds for a consumer"),
        (False, 7201, "more than 0 to 7200 seconds for a consumer"),
        (False, float("nan"), "more than 0 to 7200 seconds for a consumer"),
        (True, 0, "0.01 to 30 seconds for an ordered consumer"),
        (True, 31, "0.01 to 30 seconds for an ordered consumer"),
    ],
)
async def test_delays_that_cannot_be(
    mq: Embedded, ordered: bool, delay: float, allowed: str
) -> None:
    await produce(mq, 1, queues=1)
    with pytest.raises(ConfigurationError, match=f"retry_delay={delay}: must be {allowed}"):
        mq.consumer("g", "T", ordered=ordered, retry_delay=delay)
    async with mq.consumer("g", "T", ordered=ordered) as consumer:
        message = await one(consumer)
        with pytest.raises(ConfigurationError, match=f"after={delay}: must be {allowed}"):
            await message.retry(after=delay)


def test_a_delay_is_rounded_up_to_a_level() -> None:
    assert [level_of(each) for each in LEVELS_S] == list(range(1, 19))
    assert [level_of(each + 0.1) for each in LEVELS_S[:-1]] == list(range(2, 19))
