"""A group member whose only broker is scripted, as ours or as Apache's."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import numpy as np
import trio

from headrace import Consumer
from headrace_protocol.bodies import (
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.command import FLAG_ONEWAY, FLAG_RESPONSE
from headrace_protocol.header_codecs import encode_frame
from headrace_protocol.headers import (
    BulkPullResponseHeader,
    OffsetResponseHeader,
    PullMessageResponseHeader,
)
from headrace_protocol.message import encode_record
from headrace_protocol.serving import Reply
from tests.support.scripted import Asked, Scripted, scripted_cluster

COMMIT = RequestCode.UPDATE_CONSUMER_OFFSET
NO_TOPIC = Reply(code=ResponseCode.TOPIC_NOT_EXIST)
NOT_FOUND = Reply(code=ResponseCode.QUERY_NOT_FOUND)


class Log:
    """One queue with ``count`` messages, and a group of which only the asking client is a member.

    Pulls past the end are not answered.
    """

    def __init__(
        self, nameserver: Scripted, broker: Scripted, count: int, peer: Apache | Headrace
    ) -> None:
        self.count = count
        self.broker = broker
        self.peer = peer
        only_the_topic = nameserver.answers[RequestCode.GET_ROUTEINFO_BY_TOPIC][0]
        nameserver.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            lambda asked: only_the_topic if asked.ext["topic"] == "T" else NO_TOPIC,
        )
        broker.answer(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.members)
        broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, NOT_FOUND)
        broker.answer(RequestCode.GET_MIN_OFFSET, Reply(OffsetResponseHeader(offset=0)))
        broker.answer(peer.pull_code, self.pull)

    def members(self, _asked: Asked) -> Reply:
        client_id = HeartbeatData.decode(self.broker.last(RequestCode.HEART_BEAT).body).client_id
        body = GetConsumerListByGroupResponseBody(consumer_id_list=[client_id])
        return Reply(body=(body.encode(),))

    def pull(self, asked: Asked) -> Reply | None:
        start = int(asked.ext["queueOffset"])
        end = min(self.count, start + int(asked.ext["maxMsgNums"]))
        if start >= end:
            return None
        records = [
            encode_record(topic="T", queue_id=0, body=b"%d" % offset, queue_offset=offset)
            for offset in range(start, end)
        ]
        return self.peer.found(end, self.count, records)


class Apache:
    """A broker that knows ordinary pulls only."""

    is_headrace = False
    pull_code = RequestCode.PULL_MESSAGE

    def pulled(
        self, next_offset: int, max_offset: int, _count: int = 0, replica_id: int = 0
    ) -> PullMessageResponseHeader:
        return PullMessageResponseHeader(
            suggest_which_broker_id=replica_id,
            next_begin_offset=next_offset,
            min_offset=0,
            max_offset=max_offset,
        )

    def found(self, next_offset: int, max_offset: int, records: list[bytes]) -> Reply:
        return Reply(self.pulled(next_offset, max_offset), tuple(records))


class Headrace:
    """A broker of ours, which is asked for bulk reads."""

    is_headrace = True
    pull_code = RequestCode.BULK_PULL

    def pulled(self, next_offset: int, max_offset: int, count: int = 0) -> BulkPullResponseHeader:
        return BulkPullResponseHeader(
            next_begin_offset=next_offset,
            min_offset=0,
            max_offset=max_offset,
            count=count,
            layout="gathered",
        )

    def found(self, next_offset: int, max_offset: int, records: list[bytes]) -> Reply:
        units = np.zeros(len(records), UNIT_DTYPE)
        units["size"] = [len(record) for record in records]
        header = self.pulled(next_offset, max_offset, len(records))
        return Reply(header, (units.tobytes(), *records))


def lock_all(asked: Asked) -> Reply:
    queues = LockBatchRequestBody.decode(asked.body).mq_set
    return Reply(body=(LockBatchResponseBody(lock_ok_mq_set=queues).encode(),))


def hold_pulls(log: Log, tasks: trio.Nursery) -> None:
    """Answer a pull without messages after 15 s, as brokers do."""

    async def answer_later(asked: Asked) -> None:
        await trio.sleep(15)
        offset = int(asked.ext["queueOffset"])
        fields = msgspec.to_builtins(log.peer.pulled(offset, log.count))
        asked.channel.write(
            encode_frame(
                0, ResponseCode.PULL_NOT_FOUND, asked.opaque, flag=FLAG_RESPONSE, fields=fields
            )
        )

    def answer(asked: Asked) -> Reply | None:
        found = log.pull(asked)
        if found is None:
            tasks.start_soon(answer_later, asked)
        return found

    log.broker.answer(log.peer.pull_code, answer)


class Member:
    """A consumer of a scripted log."""

    tasks: trio.Nursery  # of a test

    def __init__(self, peer: Apache | Headrace, count: int = 10, **options: Any) -> None:
        self.peer = peer
        self.count = count
        self.options = options

    async def __aenter__(self) -> Self:
        self._cluster = scripted_cluster()
        nameserver, (self.broker,), network = await self._cluster.__aenter__()
        self.broker.is_headrace = self.peer.is_headrace
        self.log = Log(nameserver, self.broker, self.count, self.peer)
        self.routes, self.nameserver, self.connect = nameserver, nameserver.address, network.connect
        self.consumer = Consumer(
            "g",
            "T",
            nameserver=self.nameserver,
            connect=self.connect,
            start="earliest",
            **self.options,
        )
        return self

    async def __aexit__(self, *error: Any) -> None:  # noqa: PYI036 - a context manager wants its own
        await self._cluster.__aexit__(*error)

    async def take(self, count: int) -> list[int]:
        bodies = []
        async for message in self.consumer:
            bodies.append(int(message.body))
            if len(bodies) == count:
                break
        return bodies

    def committed(self) -> list[tuple[int, bool]]:
        return [
            (int(asked.ext["commitOffset"]), asked.is_oneway)
            for asked in self.broker.asked
            if asked.code == COMMIT
        ]

    def push(
        self, code: RequestCode, fields: dict[str, str], body: bytes = b"", *, oneway: bool = True
    ) -> None:
        flag = FLAG_ONEWAY if oneway else 0
        frame = encode_frame(0, code, 77, flag=flag, fields=fields, body_bytes=len(body))
        self.broker.last(self.peer.pull_code).channel.write(frame + body)

    def reply(
        self,
        asked: Asked,
        header: BulkPullResponseHeader | PullMessageResponseHeader,
        code: ResponseCode,
    ) -> None:
        """Answer a pull that the script left open."""
        fields = msgspec.to_builtins(header)
        frame = encode_frame(0, code, asked.opaque, flag=FLAG_RESPONSE, fields=fields)
        asked.channel.write(frame)
