"""``headrace consume`` without ``--follow`` reports messages that it can't read, and fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from headrace import Message, MessageQueue, PullConsumer, ReceivedMessage, embedded
from headrace.admin.commands.consume import _Printer, _Taker, _Wanted
from headrace.admin.end_reader import EndReader
from headrace.admin.goal import Goal, PartialRead
from headrace.admin.options import Patience
from headrace.consumer.subscription import Choice
from headrace.errors import BrokerError, ConnectFailed
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import OffsetResponseHeader
from headrace_protocol.serving import Reply
from tests.support.cli import headrace
from tests.support.member import NO_TOPIC, Apache, Log
from tests.support.popping import consuming, popped
from tests.support.scripted import Asked, Scripted, close, route, scripted_in_thread

ENDS = RequestCode.GET_MAX_OFFSET
START = RequestCode.GET_MIN_OFFSET
PULL = RequestCode.PULL_MESSAGE
COUNT = 3
SOON = Patience(give_up_s=0.2, pause_s=0.01)


def keep_progress(broker: Scripted) -> None:
    """Answer what a group has committed last."""
    last = Reply(code=ResponseCode.QUERY_NOT_FOUND)

    def commit(asked: Asked) -> Reply:
        nonlocal last
        last = Reply(OffsetResponseHeader(offset=int(asked.ext["commitOffset"])))
        return Reply()

    broker.answer(RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, lambda _asked: last)


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Scripted]]:
    """Two brokers with three messages each; the commands find them, and give up soon."""
    with scripted_in_thread(3) as (nameserver, *brokers):
        known = route(*brokers)
        nameserver.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, known)
        for broker in brokers:
            Log(nameserver, broker, COUNT, Apache())
            broker.answer(ENDS, Reply(OffsetResponseHeader(offset=COUNT)))
            keep_progress(broker)
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            lambda asked: known if asked.ext["topic"] == "T" else NO_TOPIC,
        )
        monkeypatch.setenv("HEADRACE_NAMESERVER", nameserver.address)
        yield brokers


REFUSED = Reply(code=ResponseCode.SYSTEM_ERROR, remark="the tier is damaged")
CASES: dict[str, tuple[dict[int, Any], str]] = {
    "no end": ({ENDS: close, PULL: close}, "not read: T/broker-1/0: the connection to"),
    "no start": ({START: close}, "not read: T/broker-1/0 up to offset 3: the connection to"),
    "no pulls": ({PULL: close}, "not read: T/broker-1/0 from offset 0 to 3: the connection to"),
    "refused pulls": ({PULL: REFUSED}, "not read: T/broker-1/0 from offset 0 to 3: PULL_MESSAGE"),
}


@pytest.mark.parametrize("arguments", [[], ["--group", "g"], ["--tail", "5"]], ids=" ".join)
@pytest.mark.parametrize("case", CASES)
def test_what_one_broker_does_not_give_is_named_after_the_rest(
    brokers: list[Scripted], case: str, arguments: list[str]
) -> None:
    answers, told = CASES[case]
    for code, answer in answers.items():
        brokers[1].answer(code, answer)
    outcome = headrace("consume", "T", *arguments, patience=SOON)
    assert outcome.stdout.split() == ["0", "1", "2"]
    assert told in outcome.stderr
    assert "repeat the command when the brokers are back" in outcome.stderr
    assert outcome.exit_code == 3


@pytest.mark.parametrize("arguments", [[], ["--tail", "5"]], ids=" ".join)
def test_a_broker_is_asked_where_to_start_before_the_pulls(
    brokers: list[Scripted], arguments: list[str]
) -> None:
    """A pull that fails closes the connection, and with it every question in flight."""
    assert headrace("consume", "T", *arguments, patience=SOON).exit_code == 0
    for broker in brokers:
        codes = [asked.code for asked in broker.asked]
        assert START not in codes[codes.index(PULL) :]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--group", "g"]], ids=" ".join)
@pytest.mark.parametrize("code", [ENDS, START, PULL])
def test_a_broker_that_comes_back_in_time_is_read(
    brokers: list[Scripted], code: int, arguments: list[str]
) -> None:
    working: Any = brokers[1].answers[code][0]
    brokers[1].answer(code, close, working)
    outcome = headrace("consume", "T", *arguments, patience=Patience(give_up_s=5, pause_s=0.01))
    assert sorted(outcome.stdout.split()) == ["0", "0", "1", "1", "2", "2"]
    assert outcome.exit_code == 0


@pytest.mark.parametrize("accepts", [None, False])
async def test_a_broker_gets_ten_seconds_to_tell_the_end_of_its_queues(
    autojump_clock: MockClock, *, accepts: bool | None
) -> None:
    here, away = MessageQueue("T", "a", 0), MessageQueue("T", "b", 0)
    asked: list[MessageQueue] = []

    async def end_of(queue: MessageQueue) -> int:
        asked.append(queue)
        if queue is away:
            raise ConnectFailed("b:1", "refused")
        return 5

    reading = Goal("T", [here, away], end_of, allow_partial=accepts)
    assert await reading.look() == {here: 5}
    assert await reading.look() == {}, "asked a moment ago"
    for _ in range(9):
        await trio.sleep(1)
        assert await reading.look() == {}
        assert not reading.is_over({here: 5}, {})
    await trio.sleep(1)
    assert reading.is_over({here: 5}, {})
    assert not reading.is_over({here: 4}, {})
    assert reading.is_over({here: 4}, {here})
    assert asked.count(here) == 1
    with pytest.raises(PartialRead, match="in 1 place:") as error:
        reading.check({here: 5}, {})
    assert ("--allow-partial" in str(error.value)) == (accepts is False)


@pytest.mark.slow
async def test_a_queue_is_read_from_its_place_although_that_was_not_found_at_first() -> None:
    async with embedded() as mq, mq.admin() as admin, mq.producer() as producer:
        await admin.create_topic("T", queues=2)
        queues = await producer.queues("T")
        for number in range(10):
            await producer.send(Message("T", b"%d" % number), queue=queues[number % 2])
        errors = [ConnectFailed("broker:10911", "refused")]

        async def start_of(queue: MessageQueue, end: int) -> int:
            if queue == queues[1] and errors:
                raise errors.pop()
            return end - 2

        consumer = PullConsumer(nameserver=mq.nameserver)
        async with consumer:
            goal = Goal("T", queues, consumer.max_offset)
            reader = EndReader(consumer, goal, Choice(), start_of)
            found: list[bytes] = []
            while not reader.is_over:
                if received := await reader.receive():
                    found += received[0].values()
            reader.check()
        assert sorted(found) == [b"6", b"7", b"8", b"9"]


@pytest.mark.parametrize(("follow", "away_s"), [(False, 8), (True, 60)])
async def test_messages_are_taken_out_once_their_topic_is_back(
    autojump_clock: MockClock, *, follow: bool, away_s: int
) -> None:
    found: list[ReceivedMessage] = []
    wanted = _Wanted("T", "earliest", Choice(), Patience(), follow, allow_partial=False)
    taker = _Taker("g", wanted, _Printer(1, found.append))
    async with consuming() as (consumer, [broker], _):
        back_at = trio.current_time() + away_s
        broker.answer(
            RequestCode.POP_MESSAGE,
            lambda _asked: REFUSED if trio.current_time() < back_at else popped(0),
        )
        await taker.take(consumer)
    assert [message.body for message in found] == [b"0"]


async def test_a_topic_that_stays_away_is_an_error_after_ten_seconds(
    autojump_clock: MockClock,
) -> None:
    wanted = _Wanted("T", "earliest", Choice(), Patience(), follow=False, allow_partial=False)
    async with consuming() as (consumer, [broker], _):
        broker.answer(RequestCode.POP_MESSAGE, REFUSED)
        began = trio.current_time()
        with pytest.raises(BrokerError, match="the tier is damaged"):
            await _Taker("g", wanted, _Printer(1, print)).take(consumer)
        assert 10 <= trio.current_time() - began <= 14
