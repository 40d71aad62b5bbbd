"""UPDATE_AND_CREATE_STATIC_TOPIC (513): changes of mappings, step by step.

The mapping is the source of truth, so it is on disk before topics.json. A queue that this broker
stops leading is closed in one step of the loop, and the answer waits until its last message is on
disk, because the new leader's offsets begin at that end. A queue that it begins to lead takes
messages once its mapping is on disk.

Source: docs/static-topics.md "What a broker accepts";
tests/broker/statictopic/test_static_changes.py.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from headrace_broker.host_budget import Host
from headrace_broker.persistence import SAVES
from headrace_broker.queue_directory import Lookup, Use
from headrace_broker.statictopic.accept import Accepted, Situation, accept
from headrace_broker.statictopic.close import answer_held, wake_held, when_on_disk
from headrace_broker.statictopic.queue_life import Event
from headrace_broker.statictopic.table import new_incarnation
from headrace_broker.statictopic.takeover import find_left
from headrace_broker.topics.attributes import apply_changes, is_batched, parse_changes
from headrace_broker.topics.table import check_config
from headrace_protocol.admin_headers import CreateStaticTopicHeader
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import Lane, RequestError
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.rights.late import check_create
from headrace_protocol.rights.rules import Kind
from headrace_protocol.serving import Reply
from headrace_protocol.statictopic.offsets import offset_delta
from headrace_protocol.waiting import Until, fetch, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.statictopic.founders import Founder, Founders
    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.statictopic.work import Workers
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.topics.rules import QueueMove, Then
    from headrace_broker.topics.table import TopicTable
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Registry, Request
    from headrace_protocol.statictopic.mapping import MappingItem, TopicMapping

# Changes up to this size are checked at once, in some 5 ms.
_AT_ONCE_BYTES: Final = 64 * 1024
_AT_ONCE_ITEMS: Final = 500
_CHECKS: Final = Lane("checks of mappings", threads=1)


class Registered(Protocol):
    """The registration at the nameservers."""

    def when_registered(self, callback: Callable[[], None]) -> None:
        """Call back once all changes so far are registered."""


class StaticTopicChanges:
    """Serves 513, and the removal of mappings with their topics.

    refused_count: number of refused mappings.
    """

    def __init__(
        self,
        table: MappingTable,
        topics: TopicTable,
        directory: QueueDirectory,
        store: MessageStore,
        offsets: ConsumerOffsets,
        groups: SubscriptionGroups,
        long_polling: LongPolling,
        moves: QueueMove,
        founders: Founders,
        workers: Workers,
        changes: HostLog,
        registration: Registered,
    ) -> None:
        self.refused_count = 0
        self._table = table
        self._topics = topics
        self._directory = directory
        self._store = store
        self._long_polling = long_polling
        self._moves = moves
        self._founders = founders
        self._workers = workers
        self._offsets = offsets
        self._groups = groups
        self._changes = changes
        self._when_registered = registration.when_registered
        # Topics with a change that is not answered yet.
        self._changing: set[str] = set()

    def register(self, registry: Registry) -> None:
        """Route the request."""
        registry.route(RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, self.update)

    def runtime_info(self) -> dict[str, str]:
        """For GET_BROKER_RUNTIME_INFO: queues that this broker leads, refused mappings."""
        return {
            "staticQueuesLed": str(self._table.led_count()),
            "staticMappingsRefused": str(self.refused_count),
        }

    async def update(self, request: Request) -> Reply:
        """UPDATE_AND_CREATE_STATIC_TOPIC: one broker's mapping, from the body."""
        header = request.header(CreateStaticTopicHeader)
        topic = header.topic
        self._check_not_changing(topic)
        with self._change_of(topic):
            try:
                config = self._config(header)
                accepted = await self._accepted(header, request)
            except (RequestError, MalformedJson):
                self.refused_count += 1
                raise
            try:
                await self._carry_out(request, accepted, config)
            except OSError as error:
                raise _not_saved(topic, error) from error
            finally:
                self._table.apply_to_all(topic, Event.ABANDON)
        return Reply()

    @contextmanager
    def _change_of(self, topic: str) -> Iterator[None]:
        self._changing.add(topic)
        try:
            yield
        finally:
            self._changing.discard(topic)

    def is_changing(self, topic: str) -> bool:
        """True while a change of a topic is not answered."""
        return topic in self._changing

    def _check_not_changing(self, topic: str) -> None:
        if topic in self._changing:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"static topic {topic} is being changed by another request: read its mapping again "
                "once that is done",
            )

    def _config(self, header: CreateStaticTopicHeader) -> TopicConfig:
        """The topic's settings after the change. Raises RequestError."""
        name = header.topic
        self._topics.check_puttable(name)
        known = self._topics.get(name)
        current = known.attributes if known else {}
        changes = parse_changes(header.attributes or "")
        # A tool sends them with each step, and after a crash to a broker that lacks them.
        new = {key: value for key, value in changes.items() if current.get(key[1:]) != value}
        config = TopicConfig(
            topic_name=name,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=bool(header.order),
            attributes=apply_changes(current, new, is_new=not self._had_messages(name)),
        )
        check_config(config)
        if is_batched(config):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {name} has queue.type=BatchCQ, and the queues of a static topic hold "
                "single messages: use another topic",
            )
        if known is not None and not self._table.is_static(name):
            self._check_empty(name)
        return config

    def _had_messages(self, topic: str) -> bool:
        return any(queue.next_offset for queue in self._store.queues_of(topic))

    def _check_empty(self, topic: str) -> None:
        """Raise RequestError for a plain topic with messages, whose queues are not logic ones."""
        for queue in self._store.queues_of(topic):
            if queue.next_offset:
                raise RequestError(
                    ResponseCode.INVALID_PARAMETER,
                    f"topic {topic} exists and is not static, and its queue {queue.queue_id} has "
                    "had messages: choose another name, or delete the topic on all brokers",
                )

    async def _accepted(self, header: CreateStaticTopicHeader, request: Request) -> Accepted:
        """The accepted mapping; a large one is checked in a thread.

        Raises RequestError, MalformedJson.
        """
        old = self._table.get(header.topic)
        found = Situation(
            self._table.broker_name,
            old,
            self._topics.get(header.topic),
            partial(self._range_of, header.topic),
            self._store.clock.now_ms(),
        )
        is_old_small = old is None or old.item_count <= _AT_ONCE_ITEMS
        if is_old_small and len(request.body) <= _AT_ONCE_BYTES:
            return accept(header, request.body, found)
        return await fetch(partial(accept, header, request.body, found), _CHECKS)

    def _range_of(self, topic: str, queue_id: int) -> tuple[int, int]:
        queue, config = self._store.find_queue(topic, queue_id), self._topics.get(topic)
        if queue is None or config is None:
            return 0, 0
        source = self._directory.local_source(Lookup(config, queue_id, Use.LIST))
        return source.known_range()[0], queue.next_offset

    # -- the steps of a change ---------------------------------------------------------------------

    async def _carry_out(self, request: Request, accepted: Accepted, config: TopicConfig) -> None:
        """The steps of a change. Raises OSError if a table can't be saved."""
        mapping, table = accepted.mapping, self._table
        topic = mapping.topic
        await self._begin_offsets(request, accepted)
        if accepted.closed:
            try:
                await until("decided batches", partial(self._moves.settle, topic, accepted.closed))
                self._close(accepted)
            finally:
                self._moves.moved(topic, accepted.closed)
            await until("the flush of the log", partial(when_on_disk, self._store))
        else:
            self._close(accepted)
        await until(SAVES, table.saved.when_saved)
        if topic not in table.marks:
            await self._mark(mapping, config)
        await until(SAVES, table.marks.saved.when_saved)
        self._log(request, accepted)
        self._open(accepted, config)
        await until(SAVES, self._topics.when_saved)
        await until("the registration", lambda then: self._when_registered(partial(then, None)))

    async def _begin_offsets(self, request: Request, accepted: Accepted) -> None:
        """Give new physical queues the groups of the items that they replace.

        Those of an empty item, which leaves the chain, and those at the end of another one. All
        groups that its broker knows are expected here.

        On disk before the mapping is: a start after a crash opens the queue without asking.
        Nothing that an earlier attempt has left there counts. A leader whose start is decided now
        stops meanwhile, since it stores the offsets of groups in the empty item until then.
        """
        topic, led = accepted.mapping.topic, accepted.mapping.led()
        if accepted.emptied:
            self._stop_beginning(topic, accepted.emptied)
        left = await find_left(self._workers, topic, accepted.emptied)
        if left.problem is not None:
            raise left.problem
        before = _items_before(accepted)
        # Without an answer the offsets are asked for when they are needed.
        ended = await find_left(self._workers, topic, before)
        for group in self._offsets.groups_of(topic):
            for physical in {*accepted.new, *(led[queue] for queue in accepted.emptied)}:
                self._offsets.withdraw(group, topic, physical)
        pairs = {(queue, group) for queue, group, _ in left.offsets}
        for queue, group, offset in ended.offsets:
            chain = accepted.mapping.chain(queue)
            assert chain is not None
            is_at_end = offset + offset_delta(before[queue]) >= chain[-1].logic_offset
            if is_at_end and queue in accepted.opened:
                pairs.add((queue, group))
        names = left.names | ended.names
        self._expect_groups(topic, names, request)
        for queue, group in sorted(pairs):
            self._offsets.commit(group, topic, led[queue], 0)
        if names:
            await until(SAVES, self._groups.saved.when_saved)
            await until(SAVES, self._offsets.when_saved)

    def _expect_groups(self, topic: str, names: set[str], request: Request) -> None:
        """Keep messages for groups that have yet to read those of other brokers."""
        for group in sorted(names):
            # A group that may not be created does not count, here as elsewhere.
            with suppress(RequestError):
                before_create = partial(check_create, request, Kind.GROUP, group)
                self._groups.get_or_create(group, Host.of(request.channel), before_create)
            self._offsets.expect(group, topic)

    def _stop_beginning(self, topic: str, queues: Iterable[int]) -> None:
        for queue in queues:
            self._table.apply(topic, queue, Event.BEGIN)
        self._table.leads_changed()

    async def _mark(self, mapping: TopicMapping, config: TopicConfig) -> None:
        """Mark a new topic with the id that other brokers have for it, and take its attributes."""
        founder: Founder | None = await Until(
            "the topic's id", lambda run: self._founders.find(mapping.topic, run.resume)
        )
        incarnation = founder.incarnation if founder else new_incarnation(mapping.epoch)
        self._table.marks.add(mapping.topic, incarnation)
        if founder is not None and self._topics.get(mapping.topic) is None:
            config.attributes = {**founder.attributes, **config.attributes}

    def _close(self, accepted: Accepted) -> None:
        """In one step: sends stop, and held pulls of the closed queues are answered."""
        topic = accepted.mapping.topic
        for opened in accepted.opened:
            self._table.apply(topic, opened, Event.OPEN)
        self._table.put(accepted.mapping)
        self._table.claim(topic, accepted.closed)
        for physical in accepted.closed.values():
            answer_held(self._store, self._long_polling, topic, physical)

    def _wake(self, topic: str) -> None:
        """Try held pulls of the queues led here again: they may wait for a decided offset."""
        for physical in self._table.led(topic).values():
            wake_held(self._store, self._long_polling, topic, physical)

    def _open(self, accepted: Accepted, config: TopicConfig) -> None:
        topic = accepted.mapping.topic
        self._table.apply_to_all(topic, Event.SAVED)
        incarnation = self._table.marks.incarnation(topic)
        assert incarnation is not None
        self._topics.put_changed(config, incarnation)
        self._wake(topic)

    def _log(self, request: Request, accepted: Accepted) -> None:
        mapping = accepted.mapping
        self._changes.info(
            request.channel.address,
            "static topic created or changed",
            topic=mapping.topic,
            epoch=mapping.epoch,
            total_queues=mapping.total_queues,
            opened=len(accepted.opened),
            closed=len(accepted.closed),
        )

    # -- other changes of the topic ----------------------------------------------------------------

    def check_plain_change(self, topic: str, new: TopicConfig | None) -> None:
        """See ``TopicRule``."""
        known = self._topics.get(topic)
        if not self._table.is_static(topic) or (
            known is not None
            and new is not None
            and (new.read_queue_nums, new.write_queue_nums)
            == (known.read_queue_nums, known.write_queue_nums)
        ):
            return
        counts = f" ({known.read_queue_nums} and {known.write_queue_nums})" if known else ""
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"topic[{topic}] is static: its read and write queues{counts} change only with its "
            f"mapping; run `headrace topic create {topic} --static --queues N` for more queues",
        )

    def restore_topics(self) -> None:
        """After a crash: topics have the queues of their mappings, and the ids of their marks."""
        for mapping in self._table.all():
            topic, queues = mapping.topic, max(mapping.logic_queues(), default=-1) + 1
            incarnation = self._table.marks.incarnation(topic)
            assert incarnation is not None
            known = self._topics.get(topic)
            if known is not None and self._topics.incarnations.of(topic) != incarnation:
                self._topics.incarnations.assign(topic, incarnation)
            if known is None or known.write_queue_nums < queues:
                config = known or TopicConfig(
                    topic_name=topic, read_queue_nums=0, write_queue_nums=0
                )
                self._topics.put_changed(_with_queues(config, queues), incarnation)

    # -- deletion ----------------------------------------------------------------------------------

    async def before_delete(self, topic: str) -> None:
        """Remove the mapping of a topic, on disk; its mark stays. Raises RequestError."""
        if not self._table.is_static(topic):
            return
        self._check_not_changing(topic)
        self._table.remove(topic)
        try:
            await until(SAVES, self._table.saved.when_saved)
        except OSError as error:
            raise _not_saved(topic, error) from error

    def after_delete(self, topic: str, then: Then) -> None:
        """Remove the mark of a topic whose deletion is on disk, then call back."""
        self._table.marks.remove(topic)
        self._table.marks.saved.when_saved(then)


def _with_queues(topic: TopicConfig, queues: int) -> TopicConfig:
    return msgspec.structs.replace(
        topic,
        read_queue_nums=max(topic.read_queue_nums, queues),
        write_queue_nums=max(topic.write_queue_nums, queues),
    )


def _not_saved(topic: str, error: Exception) -> RequestError:
    return RequestError(
        ResponseCode.SYSTEM_ERROR,
        f"the mapping of static topic {topic} can't be saved: {error}; the broker retries, and "
        "takes no messages for the queues that it is to lead; free space on its disk, then repeat "
        "the change",
    )


def _items_before(accepted: Accepted) -> dict[int, MappingItem]:
    """By queue whose start here is decided now, the item before its own in the chain."""
    before: dict[int, MappingItem] = {}
    for queue in accepted.begun - accepted.emptied.keys():
        chain = accepted.mapping.chain(queue)
        if chain is not None and len(chain) > 1 and chain[-1].logic_offset >= 0:
            before[queue] = chain[-2]
    return before
