"""DESCRIBE_GROUP (7680020) and GET_CONSUMER_RUNNING_INFO (307): the members and their queues.

Source: docs/protocol.md "Members"; tests/broker/processors/test_members.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_protocol import fastjson
from headrace_protocol.bodies import GroupQueue
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.headers import ConsumerGroupHeader, GetConsumerRunningInfoHeader
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import Until, take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.locks import QueueLocks
    from headrace_broker.consumer.pull_watch import PullWatch
    from headrace_broker.persistence import NowMs
    from headrace_daemon.serving.client_requests import Answer, ClientRequests
    from headrace_protocol.serving import Registry, Request

_QUEUES_AT_ONCE: Final = 256
# More would let a few callers fill a member's budget.
_ASKED_MAX: Final = 16


class MembersProcessor:
    """Serves requests about the members of consumer groups."""

    def __init__(
        self,
        consumers: ConsumerManager,
        locks: QueueLocks,
        watch: PullWatch,
        client_requests: ClientRequests,
        queue_count: Callable[[str], int],
        steady_ms: NowMs,
    ) -> None:
        """queue_count: number of queues of a topic that can be read."""
        self._consumers = consumers
        self._locks = locks
        self._watch = watch
        self._client_requests = client_requests
        self._queue_count = queue_count
        self._steady_ms = steady_ms

    def register(self, registry: Registry) -> None:
        """Route both requests."""
        registry.route_long(RequestCode.DESCRIBE_GROUP, self.describe)
        registry.route(RequestCode.GET_CONSUMER_RUNNING_INFO, self.running_info)

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
        name, client_id = header.consumer_group, header.client_id
        members = (each for each in self._consumers.members(name) if each.client_id == client_id)
        member = next(members, None)
        if member is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, f"The Consumer <{name}> <{client_id}> not online"
            )
        if self._client_requests.pending_count(member.channel) >= _ASKED_MAX:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"consumer <{name}> <{client_id}> has {_ASKED_MAX} requests to answer, retry later",
            )
        code, channel = RequestCode.GET_CONSUMER_RUNNING_INFO, member.channel
        answer: Answer | None = await Until(
            "a consumer",
            lambda run: self._client_requests.ask(channel, code, header, b"", run.resume),
        )
        if answer is None:
            raise RequestError(
                ResponseCode.CONSUME_MSG_TIMEOUT,
                f"consumer <{name}> <{client_id}> did not answer in time, or has left",
            )
        command = answer.command
        return Reply(None, (bytes(answer.body),), command.code, command.remark)
