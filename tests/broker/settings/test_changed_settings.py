"""Settings of topics and groups that change while messages wait: what was accepted arrives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerSendMsgBackHeader, EndTransactionHeader
from headrace_protocol.message import TRANSACTION_COMMIT
from headrace_protocol.message_ids import decode_offset_message_id
from headrace_protocol.system_topics import UNDELIVERED_TOPIC
from tests.support.waiting_broker import WaitingBroker

QUEUES = 8
BODIES = [b"%d" % number for number in range(QUEUES)]
RETRY = "%RETRY%g"


class Waiting(WaitingBroker):
    """A broker in which a message waits for each queue of a topic."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        schedule, timers, transactions = (
            self.broker.schedule,
            self.broker.timers,
            self.broker.transactions,
        )
        self.loads = [service.load for service in (schedule, timers, transactions)]
        self.runs = [schedule.run, timers.run]
        self.broker.create_topic("T", QUEUES)
        self.set_group(4)

    def set_group(self, retry_queues: int) -> None:
        group = SubscriptionGroupConfig(group_name="g", retry_queue_nums=retry_queues)
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        assert self.broker.ask(code, body=group.encode()).code == ResponseCode.SUCCESS

    def change(self, topic: str, what: dict[str, int] | int) -> None:
        if isinstance(what, int):
            self.set_group(what)
        else:
            topics = self.broker.topics
            topics.put(msgspec.structs.replace(topics.expect(topic), **what))

    def send(self, properties: str, sys_flag: int = 0) -> list[dict[str, str]]:
        answers = [
            self.produce(body, e=queue_id, i=properties, f=sys_flag)
            for queue_id, body in enumerate(BODIES)
        ]
        assert {answer.code for answer in answers} == {ResponseCode.SUCCESS}
        return [answer.command.ext() for answer in answers]

    # -- kinds of waiting --------------------------------------------------------------------------

    def delayed(self) -> Callable[[], None]:
        self.send("DELAY\x015\x02")
        return self._an_hour

    def timers(self) -> Callable[[], None]:
        self.send("TIMER_DELAY_SEC\x0160\x02")
        return self._an_hour

    def transactions(self) -> Callable[[], None]:
        halves = self.send("TRAN_MSG\x01true\x02PGROUP\x01pg\x02", 4)
        return lambda: self._commit(halves)

    def retries(self) -> Callable[[], None]:
        places = self.send("")
        for place in places:
            _, offset = decode_offset_message_id(place["msgId"])
            back = ConsumerSendMsgBackHeader(offset=offset, group="g", delay_level=1)
            answer = self.broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)
            assert answer.code == ResponseCode.SUCCESS, answer.remark
        return self._an_hour

    def _an_hour(self) -> None:
        self.clock.ms += 3_600_000

    def _commit(self, halves: list[dict[str, str]]) -> None:
        for half in halves:
            header = EndTransactionHeader(
                producer_group="pg",
                tran_state_table_offset=int(half["queueOffset"]),
                commit_log_offset=decode_offset_message_id(half["msgId"])[1],
                commit_or_rollback=TRANSACTION_COMMIT,
                msg_id=half["msgId"],
            )
            assert self.broker.ask(RequestCode.END_TRANSACTION, header).code == 0


# Fields of the topic, or the group's retryQueueNums.
CHANGES: dict[str, dict[str, int] | int] = {
    "nothing": {},
    "fewer queues": {"read_queue_nums": 1, "write_queue_nums": 1},
    "fewer to write": {"write_queue_nums": 1},
    "none to write": {"read_queue_nums": 3, "write_queue_nums": 0},
    "more queues": {"read_queue_nums": 20, "write_queue_nums": 20},
    "read-only": {"perm": 4},
    "more retry queues": 16,
    "fewer retry queues": 1,
    "no retry queue": 0,
}
KINDS = [Waiting.delayed, Waiting.timers, Waiting.transactions, Waiting.retries]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize(
    "kind", [Waiting.delayed, Waiting.timers, Waiting.transactions, Waiting.retries]
)
async def test_what_was_accepted_arrives(
    tmp_path: Path, kind: Callable[[Waiting], Callable[[], None]], what: str
) -> None:
    waiting = Waiting(tmp_path)
    broker = waiting.broker
    topic = RETRY if kind is Waiting.retries else "T"

    def arrived() -> list[bytes]:
        queues = range(broker.topics.readable_queues(topic))
        return sorted(
            message.body for queue_id in queues for message in broker.stored(topic, queue_id)
        )

    async with waiting.running():
        end = kind(waiting)
        waiting.change(topic, CHANGES[what])
        end()
        await waiting.until(lambda: len(arrived()) == QUEUES)
    assert arrived() == BODIES
    assert broker.topics.get(UNDELIVERED_TOPIC) is None


@pytest.mark.parametrize("retry_queues", [1, 2, 16])
async def test_what_is_sent_back_after_a_change_arrives(tmp_path: Path, retry_queues: int) -> None:
    waiting = Waiting(tmp_path)
    broker = waiting.broker
    async with waiting.running():
        waiting.retries()
        waiting.set_group(retry_queues)
        end = waiting.retries()
        end()
        assert broker.topics.expect(RETRY).read_queue_nums == max(4, retry_queues)

        def count() -> int:
            return sum(
                broker.store.queue(RETRY, queue_id).next_offset
                for queue_id in range(broker.topics.readable_queues(RETRY))
            )

        await waiting.until(lambda: count() == 2 * QUEUES)
