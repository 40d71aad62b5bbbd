"""The members of groups: their queues (7680020), and what is passed on to them (223, 307, 309).

Source: docs/protocol.md "Members"; tests/broker/processors/test_members.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from headrace_protocol import fastjson
from headrace_protocol.admin_headers import ConsumeDirectlyHeader, GetConsumerStatusHeader
from headrace_protocol.bodies import ConsumerStatusBody, GroupQueue
from headrace_protocol.bounds import OutOfBounds, why_too_large
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import Lane, RequestError
from headrace_protocol.headers import ConsumerGroupHeader, GetConsumerRunningInfoHeader
from headrace_protocol.message_ids import decode_offset_message_id
from headrace_protocol.rights.late import check_readable
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import Until, fetch, ready, take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from headrace_broker.consumer.groups import ConsumerManager, Member
    from headrace_broker.consumer.locks import QueueLocks
    from headrace_broker.consumer.pull_watch import PullWatch
    from headrace_broker.store.message_store import MessageStore
    from headrace_daemon.serving.client_requests import Answer, ClientRequests
    from headrace_protocol.frame import Buffer
    from headrace_protocol.serving import Registry, Request

_QUEUES_AT_ONCE: Final = 256
# More would let a few callers fill a member's budget.
_ASKED_MAX: Final = 16
# Members of one request, which asks them one by one.
_MEMBERS_MAX: Final = 100
# Text with objects as keys takes up to a microsecond per character.
_STATUSES: Final = Lane("decoding of members' answers", threads=1)
# Of frames: 3.4.9, of 2016; clients since 3.1.8 answer all three requests.
_ASKABLE_VERSION: Final = 121


class MembersProcessor:
    """Serves requests about the members of consumer groups."""

    def __init__(
        self,
        store: MessageStore,
        consumers: ConsumerManager,
        locks: QueueLocks,
        watch: PullWatch,
        client_requests: ClientRequests,
        queue_count: Callable[[str], int],
    ) -> None:
        """queue_count: number of queues of a topic that can be read."""
        self._store = store
        self._consumers = consumers
        self._locks = locks
        self._watch = watch
        self._client_requests = client_requests
        self._queue_count = queue_count
        self._steady_ms = store.clock.steady_ms

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        registry.route_long(RequestCode.DESCRIBE_GROUP, self.describe)
        registry.route(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info)
        registry.route(RequestCode.CONSUME_MESSAGE_DIRECTLY, self.consume_directly)
        registry.route(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, self.consumer_status)

    # -- queues ------------------------------------------------------------------------------------

    async def describe(self, request: Request) -> Reply:
        """DESCRIBE_GROUP: the queues of a group with their owners, pulls and locks."""
        name = request.header(ConsumerGroupHeader).consumer_group
        queues: dict[tuple[str, int], GroupQueue] = {}
        group = self._consumers.group(name)
        for topic in list(group.subscriptions) if group else ():
            for queue_id in range(self._queue_count(topic)):
                queues[topic, queue_id] = GroupQueue(topic=topic, queue_id=queue_id)
                if not queue_id % _QUEUES_AT_ONCE:
                    await take_break()
        await self._add_pulls(name, queues)
        await self._add_locks(name, queues)
        conflict = self._consumers.conflict(name)
        rows = await fastjson.dumps_list_sliced(queues.values())
        return Reply(body=fastjson.dumps_parts({"queues": rows, "conflict": conflict}))

    async def _add_pulls(self, name: str, queues: dict[tuple[str, int], GroupQueue]) -> None:
        group, watch = self._consumers.group(name), self._watch
        if group is None:
            return
        members = {each.channel.address: each.client_id for each in self._consumers.members(name)}
        for number, (key, pull) in enumerate(list(watch.pulls_of(name).items())):
            if key in queues:
                queue = queues[key]
                queue.is_idle = watch.is_idle(group, pull)
                if pull.address:
                    queue.owner = members.get(pull.address, pull.address)
                    queue.pulled_ms_ago = int(watch.age_s(pull) * 1000)
            if not number % _QUEUES_AT_ONCE:
                await take_break()

    async def _add_locks(self, name: str, queues: dict[tuple[str, int], GroupQueue]) -> None:
        locks = self._locks.of_group(name, self._steady_ms())
        for number, (queue, client_id, ms_left) in enumerate(locks):
            key = queue.topic, queue.queue_id
            row = queues.setdefault(key, GroupQueue(topic=queue.topic, queue_id=queue.queue_id))
            row.lock_owner, row.lock_ms_left = client_id, ms_left
            if not number % _QUEUES_AT_ONCE:
                await take_break()

    # -- members -----------------------------------------------------------------------------------

    async def running_info(self, request: Request) -> Reply:
        """GET_CONSUMER_RUNNING_INFO: passed to the member, whose answer is passed back."""
        header = request.header(GetConsumerRunningInfoHeader)
        member = self._member(header.consumer_group, header.client_id)
        group = header.consumer_group
        return _passed_back(await self._ask(group, member, request.command.code, header))

    async def consume_directly(self, request: Request) -> Reply:
        """CONSUME_MESSAGE_DIRECTLY: a member processes a message of this broker again."""
        header = request.header(ConsumeDirectlyHeader)
        member = self._member(header.consumer_group, header.client_id or "")
        record: Buffer = request.body
        if header.msg_id:
            record = await ready(partial(self._record, header.msg_id))
            check_readable(request, record)
        group = header.consumer_group
        return _passed_back(await self._ask(group, member, request.command.code, header, record))

    def _record(self, message_id: str) -> Buffer:
        """The record of an offset message id. Raises RequestError, NotReady."""
        try:
            _, physical_offset = decode_offset_message_id(message_id)
        except ValueError:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER, f"{message_id} is no offset message id"
            ) from None
        if self._store.message_at(physical_offset) is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"no message of this broker has the id {message_id}"
            )
        record = self._store.commit_log.record_at(physical_offset)
        assert record is not None
        return record

    async def consumer_status(self, request: Request) -> Reply:
        """INVOKE_BROKER_TO_GET_CONSUMER_STATUS: offsets that members have come to, by client id."""
        header = request.header(GetConsumerStatusHeader)
        members = self._consumers.members(header.group)
        if header.client_addr:
            members = [self._member(header.group, header.client_addr)]
        if not members:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE,
                f"No Any Consumer online in the consumer group: [{header.group}]",
            )
        if len(members) > _MEMBERS_MAX:
            raise OutOfBounds(
                f"group {header.group} has {len(members)} members, and {_MEMBERS_MAX} are the most "
                "to be asked by one request: name one with clientAddr"
            )
        table: dict[str, fastjson.Written] = {}
        for member in members:
            status = await self._status(member, header)
            table[member.client_id] = await fastjson.dumps_sliced(
                status.message_queue_table.items()
            )
        return Reply(body=fastjson.dumps_parts({"consumerTable": table}))

    async def _status(self, member: Member, header: GetConsumerStatusHeader) -> ConsumerStatusBody:
        """A member's offsets, which no other bound has checked. Raises RequestError."""
        code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        command, body = await self._ask(header.group, member, code, header)
        if command.code != ResponseCode.SUCCESS:
            raise _no_status(header.group, member, command.remark)
        if reason := why_too_large(code, len(body)):
            raise _no_status(header.group, member, reason)
        try:
            return await fetch(partial(ConsumerStatusBody.decode, body), _STATUSES)
        except fastjson.MalformedJson as error:
            raise _no_status(header.group, member, error) from error

    def _member(self, name: str, client_id: str) -> Member:
        """A member that can be asked. Raises RequestError."""
        members = (each for each in self._consumers.members(name) if each.client_id == client_id)
        member = next(members, None)
        if member is None:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"The Consumer <{name}> <{client_id}> not online"
            )
        if member.version < _ASKABLE_VERSION:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"The Consumer <{name}> <{client_id}> is a client of version {member.version}, too "
                "old to be asked: upgrade it",
            )
        return member

    async def _ask(
        self, group: str, member: Member, code: int, header: msgspec.Struct, body: Buffer = b""
    ) -> Answer:
        """A member's answer. Raises RequestError if there is none."""
        client_id = member.client_id
        if self._client_requests.pending_count(member.channel) >= _ASKED_MAX:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"consumer <{group}> <{client_id}> has {_ASKED_MAX} requests to answer, retry "
                "later",
            )
        answer: Answer | None = await Until(
            "a consumer",
            lambda run: self._client_requests.ask(
                member.channel, RequestCode(code), header, body, run.resume
            ),
        )
        if answer is None:
            raise RequestError(
                ResponseCode.CONSUME_MSG_TIMEOUT,
                f"consumer <{group}> <{client_id}> did not answer in time, or has left",
            )
        return answer


def _passed_back(answer: Answer) -> Reply:
    command = answer.command
    return Reply(None, (bytes(answer.body),), command.code, command.remark)


def _no_status(group: str, member: Member, reason: object) -> RequestError:
    return RequestError(
        ResponseCode.SYSTEM_ERROR,
        f"consumer <{group}> <{member.client_id}> reports no status: {reason}",
    )
