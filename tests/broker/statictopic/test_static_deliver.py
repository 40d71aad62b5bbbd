"""Messages that waited go to the leader of their logic queue at the moment they are due."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import EndTransactionHeader, SendMessageResponseHeader
from headrace_protocol.message import TRANSACTION_COMMIT, TRANSACTION_PREPARED, encode_properties
from headrace_protocol.message_ids import decode_offset_message_id
from headrace_protocol.system_topics import UNDELIVERED_TOPIC
from tests.support.static_brokers import TOPIC, Brokers, item
from tests.support.stores import read_all
from tests.support.until import until
from tests.support.wire import send_header

A, B, A2 = item("a", 0, 0), item("b", 1, 100), item("a", 2, 200, 1)


@pytest.fixture
def brokers(tmp_path: Path) -> Brokers:
    brokers = Brokers(tmp_path)
    brokers.map((A,))
    brokers.send("a", b"first")
    return brokers


@asynccontextmanager
async def scheduling(brokers: Brokers) -> AsyncIterator[None]:
    """The schedule of broker a runs."""
    broker = brokers["a"]
    schedule = broker.schedule
    await trio.to_thread.run_sync(schedule.load)
    async with trio.open_nursery() as nursery:
        await nursery.start(broker.store.run)
        nursery.start_soon(schedule.run)
        yield
        nursery.cancel_scope.cancel()


def bodies(brokers: Brokers, broker: str, queue_id: int = 0, topic: str = TOPIC) -> list[bytes]:
    store = brokers[broker].store
    queue = store.find_queue(topic, queue_id)
    return [record.body for record in read_all(store, queue)] if queue else []


def delay(brokers: Brokers, body: bytes) -> None:
    properties = encode_properties({"KEYS": "k", "DELAY": "1"}).decode()
    answer = brokers["a"].ask(RequestCode.SEND_MESSAGE_V2, send_header(properties=properties), body)
    assert answer.code == ResponseCode.SUCCESS


async def test_a_delayed_message_goes_to_the_leader_of_the_moment(
    brokers: Brokers, autojump_clock: object
) -> None:
    async with scheduling(brokers):
        for body in (b"1", b"2"):
            delay(brokers, body)
        brokers.map((A, B))
        brokers["a"].clock.ms += 60_000
        await until(lambda: len(bodies(brokers, "b")) == 2)
    assert (bodies(brokers, "a"), bodies(brokers, "b")) == ([b"first"], [b"1", b"2"])
    (message, _) = read_all(brokers["b"].store, brokers["b"].store.queue(TOPIC, 0))
    assert message.properties["KEYS"] == "k"
    assert not {"DELAY", "REAL_TOPIC", "REAL_QID"} & message.properties.keys()


async def test_a_delayed_message_goes_to_another_queue_of_its_own_broker(
    brokers: Brokers, autojump_clock: object
) -> None:
    async with scheduling(brokers):
        delay(brokers, b"1")
        brokers.map((A, B, A2))
        brokers["a"].clock.ms += 60_000
        await until(lambda: bool(bodies(brokers, "a", 1)))
    assert bodies(brokers, "a") == [b"first"]


async def test_a_delayed_message_waits_for_a_leader_that_is_away(
    brokers: Brokers, autojump_clock: object
) -> None:
    async with scheduling(brokers):
        delay(brokers, b"1")
        brokers.map((A, B))
        brokers.away.add("b")
        brokers["a"].clock.ms += 60_000
        await trio.sleep(10)
        brokers.away.clear()
        await until(lambda: bool(bodies(brokers, "b")))
    assert bodies(brokers, "b") == [b"1"]
    assert bodies(brokers, "a", topic=UNDELIVERED_TOPIC) == []


async def test_what_the_leader_refuses_goes_to_the_undelivered_ones(
    brokers: Brokers, autojump_clock: object
) -> None:
    async with scheduling(brokers):
        delay(brokers, b"1")
        brokers.map((A, B))
        brokers["b"].config.broker_permission = 4
        brokers["a"].clock.ms += 60_000
        await until(lambda: bool(bodies(brokers, "a", topic=UNDELIVERED_TOPIC)))
    assert bodies(brokers, "a", topic=UNDELIVERED_TOPIC) == [b"1"]


async def test_a_committed_message_goes_to_the_leader(
    brokers: Brokers, autojump_clock: object
) -> None:
    broker = brokers["a"]
    await trio.to_thread.run_sync(broker.transactions.load)
    properties = encode_properties({"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": "A1"}).decode()
    header = send_header(properties=properties, sys_flag=TRANSACTION_PREPARED)
    half = broker.ask(RequestCode.SEND_MESSAGE_V2, header, b"paid")
    sent = half.command.header(SendMessageResponseHeader)
    async with scheduling(brokers):
        brokers.map((A, B))
        end = EndTransactionHeader(
            producer_group="p",
            tran_state_table_offset=sent.queue_offset,
            commit_log_offset=decode_offset_message_id(sent.msg_id)[1],
            commit_or_rollback=TRANSACTION_COMMIT,
            msg_id="A1",
        )
        assert broker.ask(RequestCode.END_TRANSACTION, end).code == ResponseCode.SUCCESS
        broker.clock.ms += 60_000
        await until(lambda: bool(bodies(brokers, "b")))
    assert (bodies(brokers, "a"), bodies(brokers, "b")) == ([b"first"], [b"paid"])
