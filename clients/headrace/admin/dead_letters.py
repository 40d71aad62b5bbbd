"""The dead letters of a group, and their replay: each is sent once more, to its topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.admin.failures import CommandFailed, NotFound
from headrace.consumer.offset_store import OffsetStore
from headrace.consumer.pulls import SLICE_BYTES, Wanted
from headrace.consumer.subscription import Subscription
from headrace.errors import RouteNotFound
from headrace.instance import REQUEST_TIMEOUT_MS, ClientInstance
from headrace.producer.encoding import DEFAULT_TOPIC_QUEUES, STORED
from headrace.producer.publication import Publication
from headrace_protocol.codes import RequestCode
from headrace_protocol.compression import COMPRESSED, COMPRESSION_MASK
from headrace_protocol.headers import SendMessageHeaderV2
from headrace_protocol.message import (
    CRC32,
    DELAY,
    MULTI_TAGS,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    SYSTEM_PROPERTIES,
    UNIQ_KEY,
)
from headrace_protocol.system_topics import DEFAULT_TOPIC, DLQ_PREFIX, READER_GROUP

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.admin.client import Admin
    from headrace.consumer.pulls import PullAnswer
    from headrace.received import ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

# Its committed offset in a queue of dead letters: those before it are replayed.
REPLAY_GROUP = "headrace_dlq_replay"
# RocketMQ's name for the dead letter that a message comes from.
_ORIGIN = "DLQ_ORIGIN_MESSAGE_ID"
_MESSAGES_MAX = 1000
# What the broker did with the message before; kept, these would make it wait again.
_OF_FORMER_LIFE = frozenset(
    name
    for name in SYSTEM_PROPERTIES
    if name.startswith(("REAL_", "TIMER_")) or name in {DELAY, ORIGIN_MESSAGE_ID, CRC32, "TRAN_MSG"}
)
# The broker sets the other flags itself.
_FLAGS_OF_BODY = COMPRESSED | COMPRESSION_MASK | MULTI_TAGS


class DeadLetters:
    """Reads and replays the dead letters of ``group``; use it in ``async with``."""

    def __init__(self, admin: Admin, group: str, nameserver: str | None) -> None:
        self.topic = f"{DLQ_PREFIX}{group}"
        self._admin = admin
        self._group = group
        self._instance = ClientInstance(nameserver)
        self._offsets = OffsetStore(self._instance)

    async def __aenter__(self) -> Self:
        await self._instance.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._instance.stop()

    # -- reading -----------------------------------------------------------------------------------

    async def stored(self, since_ms: int, count_max: int) -> list[ReceivedMessage]:
        """The oldest ``count_max`` dead letters stored since a time. Raises NotFound."""
        found = []
        for queue in await self._queues():
            start = await self._offsets.offset_at(queue, since_ms)
            end = await self._offsets.max_offset(queue)
            found += [
                letter async for letter in self._read(READER_GROUP, queue, start, end, count_max)
            ]
        return sorted(found, key=lambda letter: letter.store_timestamp_ms)[:count_max]

    async def waiting(self, since_ms: int) -> AsyncIterator[ReceivedMessage]:
        """The dead letters behind the progress of former replays, stored since a time.

        New ones that arrive meanwhile are left out. Raises NotFound for an unknown group.
        """
        for queue in await self._queues():
            start = await self._offsets.offset_at(queue, since_ms)
            progress = await self._offsets.committed(REPLAY_GROUP, queue)
            end = await self._offsets.max_offset(queue)
            async for letter in self._read(
                REPLAY_GROUP, queue, max(start, progress or 0), end, _MESSAGES_MAX
            ):
                yield letter

    async def one(self, message_id: str) -> AsyncIterator[ReceivedMessage]:
        """The dead letter with the broker's id or the producer's. Raises NotFound."""
        letter = None
        if await self._queues():
            letter = await self._admin.message(message_id, self.topic)
        if letter is None or letter.queue.topic != self.topic:
            raise NotFound(f"group {self._group} has no dead letter {message_id}")
        yield letter

    async def _queues(self) -> list[MessageQueue]:
        try:
            queues = (await self._instance.route(self.topic)).read_queues
        except RouteNotFound:
            # The first dead letter creates the topic.
            groups = await self._admin.groups(system=True)
            if self._group not in {config.group_name for config in groups}:
                raise NotFound(
                    f"group {self._group} does not exist; see `headrace group list`"
                ) from None
            return []
        if not queues:
            raise CommandFailed(
                f"no queue of {self.topic} can be read; allow it by "
                f"`headrace topic alter '{self.topic}' --perm rw`"
            )
        return list(queues)

    async def _read(
        self, group: str, queue: MessageQueue, start: int, end: int, count_max: int
    ) -> AsyncIterator[ReceivedMessage]:
        while start < end:
            result = await self._pull(group, queue, start, min(count_max, end - start))
            if result.is_offset_illegal:
                # After a reset, a group's next pull gets its new offset, which is ours already.
                result = await self._pull(group, queue, start, min(count_max, end - start))
            for letter in result.batch or ():
                yield letter
            if result.next_offset <= start:
                break
            start = result.next_offset

    async def _pull(self, group: str, queue: MessageQueue, start: int, count: int) -> PullAnswer:
        address = await self._instance.queue_address(queue)
        connection = await self._instance.connection(address)
        subscription = Subscription(queue.topic)
        wanted = Wanted(group, queue, start, subscription, count, SLICE_BYTES)
        return await wanted.ask(connection, timeout_ms=REQUEST_TIMEOUT_MS)

    # -- replay ------------------------------------------------------------------------------------

    def target(self, letter: ReceivedMessage, to: str | None) -> str:
        """The topic to replay to: ``to`` or the one that the message was first sent to."""
        target = to or letter.stored.properties.get(RETRY_TOPIC)
        if not target:
            raise CommandFailed(
                f"dead letter {letter.offset_message_id} does not tell which topic it comes from; "
                "give --to TOPIC"
            )
        return target

    async def is_replayed(self, letter: ReceivedMessage, target: str) -> bool:
        """True if a former replay, perhaps interrupted before its end, has sent it to ``target``.

        Relies on the broker's index of messages.
        """
        copies = await self._admin.query_by_id(
            letter.message_id, target, begin_ms=letter.store_timestamp_ms
        )
        return any(
            copy.stored.properties.get(_ORIGIN) == letter.offset_message_id for copy in copies
        )

    async def replay(self, letter: ReceivedMessage, target: str) -> None:
        """Send it once: an attempt without an answer may have stored it, so there is no second."""
        stored = letter.stored
        publication = Publication(REPLAY_GROUP, await self._instance.route(target))
        chosen = publication.target(letter.key.encode(), avoid=())
        if chosen.error:
            raise chosen.error
        header = SendMessageHeaderV2(
            producer_group=REPLAY_GROUP,
            topic=target,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=DEFAULT_TOPIC_QUEUES,
            queue_id=chosen.queue.queue_id,
            sys_flag=stored.sys_flag & _FLAGS_OF_BODY,
            born_timestamp=stored.born_timestamp,
            flag=stored.flag,
            properties=_properties(letter, target),
            reconsume_times=0,
            unit_mode=False,
            batch=False,
            bname=chosen.broker_name,
        )
        response = await self._instance.request(
            chosen.address, RequestCode.SEND_MESSAGE_V2, header, stored.stored_body
        )
        response.expect(*STORED)

    async def commit(self, letter: ReceivedMessage) -> None:
        """Have later replays begin behind a dead letter."""
        await self._offsets.commit(REPLAY_GROUP, {letter.queue: letter.queue_offset + 1})


def _properties(letter: ReceivedMessage, target: str) -> str:
    """The properties of the message sent to ``target``."""
    kept = {
        name: value
        for name, value in letter.stored.properties.items()
        if name not in _OF_FORMER_LIFE
    }
    if kept.get(RETRY_TOPIC) != target:
        kept.pop(RETRY_TOPIC, None)
    own = {UNIQ_KEY: letter.message_id, _ORIGIN: letter.offset_message_id}
    return "".join(f"{name}\x01{value}\x02" for name, value in (kept | own).items())
