"""Clients of a broker with messages that wait: what they ask for, and what they were told.

They outlive the broker. What one was told must be in the log as long as no power cut may have taken
it, which with synchronous flush is always.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import trio

from headrace_protocol.admin_headers import ResumeCheckHalfMessageHeader
from headrace_protocol.bodies import HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    ConsumerSendMsgBackHeader,
    EndTransactionHeader,
    RecallMessageHeader,
)
from headrace_protocol.message import (
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    encode_properties,
)
from headrace_protocol.message_ids import decode_offset_message_id
from tests.simulation.history import PromiseBroken
from tests.simulation.waiting_promises import WaitingLog
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.ledger import Half, checks
from tests.support.wire import send_header

TOPICS: Final = ("One", "Two")
GROUPS: Final = ("payers", "shippers")
_ANSWER_S: Final = 3.0
_LOOK_S: Final = 0.01
_DELAYS_MS: Final = (1, 400, 2000, 9000, 50_000)


class Handle(NamedTuple):
    """The key, topic and handle that recall a timer."""

    key: str
    topic: str
    handle: str


@dataclass
class Told:
    """The answers that clients got in all lives.

    halves: by key, those that its producer heard of. group_of: whose a half is. stored, recalled:
    keys of messages. decided: by key.
    """

    sent: int = 0
    halves: defaultdict[str, list[Half]] = field(default_factory=lambda: defaultdict(list))
    group_of: dict[str, str] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    recalled: set[str] = field(default_factory=set)
    decided: dict[str, int] = field(default_factory=dict)

    def forget_lost(self, log: WaitingLog) -> None:
        """A power cut took what was not flushed: another record may lie in the place of a half."""
        self.stored.clear()
        self.recalled.clear()
        self.decided.clear()
        keys = {
            half.physical_offset: one.key
            for one in log.transactions.values()
            for half in one.halves
        }
        for key, halves in self.halves.items():
            self.halves[key] = [half for half in halves if keys.get(half.physical_offset) == key]

    def check(self, log: WaitingLog) -> None:
        """Raises PromiseBroken for anything that was acknowledged and is not in the log."""
        if lost := self.stored - log.keys:
            raise PromiseBroken(f"{sorted(lost)} were acknowledged, and are lost")
        if lost := self.recalled - log.recalled.keys():
            raise PromiseBroken(f"recalls of {sorted(lost)} were acknowledged, and are lost")
        for key, decision in self.decided.items():
            kept = [
                one.commit is not None
                if decision == TRANSACTION_COMMIT
                else bool(one.named) and not one.decisions
                for one in log.of_key(key)
            ]
            if not any(kept):
                found = log.of_key(key)
                raise PromiseBroken(f"decision {decision} on {key} is lost: {found}")


class Clients:
    """All clients of one life of a broker."""

    def __init__(
        self,
        broker: BrokerUnderTest,
        rng: Random,
        told: Told,
        counts: Counter[str],
        log: Callable[[], WaitingLog],
    ) -> None:
        """log: what the log holds at the moment."""
        self.broker = broker
        self.log = log
        self.rng = rng
        self.told = told
        self.counts = counts
        self.producers: dict[str, MemoryChannel] = {}

    async def ask(
        self, code: int, header: msgspec.Struct | None = None, body: bytes = b""
    ) -> Answer | None:
        """The answer to a request; None if none comes."""
        channel = MemoryChannel()
        channel.is_greeted = True
        self.broker.send(code, header, body, channel)
        with trio.move_on_after(_ANSWER_S):
            while not channel.written:  # noqa: ASYNC110 - the clock jumps
                await trio.sleep(_LOOK_S)
            ((command, reply),) = channel.replies()
            return Answer(command, reply)
        return None

    # -- messages ----------------------------------------------------------------------------------

    async def send(
        self, properties: Mapping[str, object], group: str = "p", sys_flag: int = 0
    ) -> tuple[str, dict[str, str]] | None:
        """Send a message; its key and the fields of the answer, None without success."""
        told, rng = self.told, self.rng
        key = f"K{told.sent}"
        told.sent += 1
        text = encode_properties(
            {name: str(value) for name, value in {"UNIQ_KEY": key, **properties}.items()}
        )
        header = send_header(
            rng.randrange(2),
            producer_group=group,
            topic=rng.choice(TOPICS),
            default_topic_queue_nums=2,
            sys_flag=sys_flag,
            properties=text.decode(),
        )
        body = key.encode() + rng.randbytes(rng.choice((10, 300)))
        answer = await self.ask(RequestCode.SEND_MESSAGE_V2, header, body)
        if answer is None or answer.code != ResponseCode.SUCCESS:
            return None
        self.counts["messages acknowledged"] += 1
        told.stored.add(key)
        return key, {**answer.command.ext(), "topic": header.topic}

    async def send_delayed(self) -> None:
        """A message with a delay level, or a few."""
        for _ in range(self.rng.choice((1, 1, 5))):
            await self.send({"DELAY": self.rng.choice((0, 1, 1, 2, 3, 9))})

    async def send_timer(self) -> None:
        """A message with a delivery time, or a few."""
        for _ in range(self.rng.choice((1, 1, 5))):
            if (sent := await self.send(self._time())) and "recallHandle" in sent[1]:
                key, fields = sent
                self.told.handles.append(Handle(key, fields["topic"], fields["recallHandle"]))

    def _time(self) -> dict[str, int]:
        delay_ms = self.rng.choice(_DELAYS_MS) + self.rng.randrange(1000)
        now_ms = self.broker.clock.ms
        return self.rng.choice(
            (
                {"TIMER_DELAY_MS": delay_ms},
                {"TIMER_DELAY_SEC": delay_ms // 1000 + 1},
                {"TIMER_DELIVER_MS": now_ms + delay_ms},
            )
        )

    async def recall(self) -> None:
        """Recall a timer, known or delivered or recalled before."""
        if not self.told.handles:
            return
        key, topic, handle = self.rng.choice(self.told.handles[-20:])
        header = RecallMessageHeader(topic=topic, recall_handle=handle, producer_group="p")
        answer = await self.ask(RequestCode.RECALL_MESSAGE, header)
        if answer is not None and answer.code == ResponseCode.SUCCESS:
            self.counts["timers recalled"] += 1
            self.told.recalled.add(key)

    async def send_back(self) -> None:
        """A consumer could not handle one of the newest messages."""
        messages = [
            each
            for each in self.log().messages
            if each.topic in TOPICS or each.topic.startswith("%RETRY%")
        ]
        if messages:
            header = ConsumerSendMsgBackHeader(
                offset=self.rng.choice(messages[-9:]).physical_offset,
                group="g",
                delay_level=self.rng.choice((0, 1, 2, -1)),
            )
            answer = await self.ask(RequestCode.CONSUMER_SEND_MSG_BACK, header)
            is_stored = answer is not None and answer.code == ResponseCode.SUCCESS
            self.counts["messages sent back"] += is_stored

    # -- transactions ------------------------------------------------------------------------------

    async def send_half(self) -> None:
        """A transactional message, which may wait once more after its commit."""
        group = self.rng.choice(GROUPS)
        waits: dict[str, Any] = self.rng.choice(({}, {}, {"DELAY": 1}, self._time()))
        properties = {"TRAN_MSG": "true", "PGROUP": group, **waits}
        sent = await self.send(properties, group, TRANSACTION_PREPARED)
        if sent is not None:
            key, fields = sent
            _, place = decode_offset_message_id(fields["msgId"])
            self.told.halves[key].append(Half(int(fields["queueOffset"]), place, key))
            self.told.group_of[key] = group

    async def decide(self) -> None:
        """A producer tells a decision, in time, late, again, or another one."""
        keys = [key for key, halves in self.told.halves.items() if halves][-20:]
        if keys:
            decision = self.rng.choice((TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, 0))
            await self.end(self.rng.choice(keys), decision)

    async def end(self, key: str, decision: int) -> None:
        """Tell a decision about any of the halves of a key. Raises PromiseBroken."""
        self.hear_checks()
        half, told = self.rng.choice(self.told.halves[key]), self.told
        is_stranger = self.rng.random() < 0.1
        header = EndTransactionHeader(
            producer_group="stranger" if is_stranger else told.group_of[key],
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.physical_offset,
            commit_or_rollback=decision,
            msg_id=key,
        )
        answer = await self.ask(RequestCode.END_TRANSACTION, header)
        if not decision or answer is None or answer.code != ResponseCode.SUCCESS:
            return
        if is_stranger:
            raise PromiseBroken(f"a stranger decided {key}")
        if told.decided.setdefault(key, decision) != decision:
            raise PromiseBroken(f"{key} was decided as {told.decided[key]} and as {decision}")
        self.counts["transactions decided"] += 1

    async def join(self) -> None:
        """A producer group has a live member, from now on or again, or has none any more."""
        group = self.rng.choice(GROUPS)
        if group in self.producers and self.rng.random() < 0.3:
            self.hear_checks()
            self.producers.pop(group).is_open = False
            return
        self.connect(group)

    def connect(self, group: str) -> None:
        """A producer sends a heartbeat."""
        channel = self.producers.setdefault(group, MemoryChannel())
        channel.is_greeted = True
        beat = HeartbeatData(
            client_id=f"of {group}", producer_data_set=[ProducerData(group_name=group)]
        )
        self.hear_checks()
        self.broker.ask(RequestCode.HEART_BEAT, body=beat.encode(), channel=channel)

    def hear_checks(self) -> list[str]:
        """Note the halves that producers are asked about; their keys. Raises PromiseBroken."""
        keys = []
        for group, channel in self.producers.items():
            for check in checks(channel):
                key = check.message.properties["UNIQ_KEY"]
                if self.told.group_of.setdefault(key, group) != group:
                    raise PromiseBroken(f"{group} was asked about {key} of another group")
                if key in self.told.decided:
                    told = self.log().of_key(key)
                    raise PromiseBroken(f"{key} was decided, and its producer is asked: {told}")
                self.told.halves[key].append(check.half)
                keys.append(key)
        self.counts["checks"] += len(keys)
        return keys

    async def answer_checks(self) -> None:
        """Producers answer some of the checks."""
        for key in self.hear_checks():
            if self.rng.random() < 0.5:
                await self.end(key, self.rng.choice((TRANSACTION_COMMIT, TRANSACTION_ROLLBACK)))

    async def resume(self) -> None:
        """An administrator gives a discarded message a second chance."""
        discards = [each for one in self.log().transactions.values() for each in one.discards]
        if discards:
            discarded = self.rng.choice(discards)
            header = ResumeCheckHalfMessageHeader(msg_id=discarded.offset_message_id)
            answer = await self.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
            is_stored = answer is not None and answer.code == ResponseCode.SUCCESS
            self.counts["discarded messages resumed"] += is_stored
