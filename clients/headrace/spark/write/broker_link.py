"""Requests to one broker, retried while it is unreachable.

Source: docs/spark.md "Writing".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
from zlib_ng.zlib_ng import crc32

from headrace.errors import ConnectFailed, ConnectionLost, RequestTimeout
from headrace.producer.encoding import DEFAULT_TOPIC_QUEUES, STORED
from headrace.spark.connections import PLAIN, TASK_TIMEOUT_MS, Connections, Dial
from headrace.spark.retry import WRITING, Patience, Waiting
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    BulkSendHeader,
    SendMessageHeaderV2,
    StageSealHeader,
    StageSealResponseHeader,
    StageSendHeader,
)
from headrace_protocol.staging import StagedAttempt
from headrace_protocol.system_topics import DEFAULT_TOPIC

if TYPE_CHECKING:
    from headrace.producer.encoding import Outgoing
    from headrace_protocol.blocks import EncodedBlock
    from headrace_protocol.drivers.blocking import BlockingConnection
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.frame import Buffer

GROUP = "headrace-spark"
AWAY = (ConnectFailed, ConnectionLost, RequestTimeout)
# The broker is overloaded and accepts the same request later.
_LATER = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL})


class AttemptName(NamedTuple):
    """The identity of one task attempt for a micro-batch of a query."""

    query_id: str
    batch_id: int
    attempt: str


class _Request(NamedTuple):
    code: int
    header: msgspec.Struct | None
    body: Buffer


class BrokerLink:
    """A connection to one broker, with one request in flight while the next is built.

    Reconnects after a failure and resends the unanswered request. Not thread-safe.
    """

    def __init__(self, address: str, dial: Dial = PLAIN, patience: Patience = WRITING) -> None:
        self.address = address
        self._patience = patience
        self._unanswered: _Request | None = None
        self._connections = Connections(dial)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and drop the request in flight."""
        self._connections.close()

    def ask(self, code: int, header: msgspec.Struct | None = None, body: Buffer = b"") -> Response:
        """The response to one request, whatever its code.

        Raises ConnectFailed, ConnectionLost or RequestTimeout if the broker stays unreachable.
        """
        until = time.monotonic() + self._patience.retry_s
        with Waiting() as waiting:
            while True:
                pause_s = self._patience.pause_s
                try:
                    response = self._open().request(code, header, body, timeout_ms=TASK_TIMEOUT_MS)
                    if response.command.code not in _LATER or time.monotonic() > until:
                        return response
                    refusal = response.error()
                    waiting.failed(refusal)
                    pause_s = max(pause_s, refusal.retry_after_ms / 1000)
                except AWAY as error:
                    self.close()
                    if time.monotonic() > until:
                        raise
                    waiting.failed(error)
                time.sleep(pause_s)

    def send(self, code: int, header: msgspec.Struct, body: Buffer) -> None:
        """Send a request as soon as the previous one is stored. Raises as ``finish``."""
        self.finish()
        self._unanswered = _Request(code, header, body)
        try:
            connection = self._open()
            connection.submit(code, header, body, self._take)
            connection.drain(1, timeout_ms=TASK_TIMEOUT_MS)
        except AWAY:
            self.close()

    def finish(self) -> None:
        """Wait until the request in flight is stored. Raises BrokerError, or as ``ask``."""
        if self._unanswered:
            try:
                self._open().drain(timeout_ms=TASK_TIMEOUT_MS)
            except AWAY:
                self.close()
        if self._unanswered:
            self.ask(*self._unanswered).expect(*STORED)
            self._unanswered = None

    def _take(self, response: Response) -> None:
        if response.command.code not in _LATER:
            self._unanswered = None
            response.expect(*STORED)

    def _open(self) -> BlockingConnection:
        return self._connections.open(self.address)

    def is_headrace(self) -> bool:
        """True for a broker that runs headrace. Raises as ``ask``."""
        self.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        return self._open().peer_is_headrace


class StagedBlocks:
    """The blocks of one attempt, staged at a headrace broker."""

    def __init__(self, link: BrokerLink, name: AttemptName) -> None:
        self.block_count = 0
        self._link = link
        self._name = name

    def send(self, topic: str, queue_id: int, block: EncodedBlock) -> None:
        """Send a block. Raises as ``BrokerLink.send``."""
        header = StageSendHeader(
            **self._name._asdict(),
            **_target(topic, queue_id),
            producer_group=GROUP,
            count=block.record_count,
            body_crc32=crc32(block.body),
            block_number=self.block_count,
        )
        self._link.send(RequestCode.STAGE_SEND, header, block.body)
        self.block_count += 1

    def seal(self) -> StagedAttempt:
        """Have the broker seal the attempt on its disk. Raises as ``BrokerLink.finish``."""
        self._link.finish()
        header = StageSealHeader(**self._name._asdict(), block_count=self.block_count)
        answer = self._link.ask(RequestCode.STAGE_SEAL, header).expect()
        sealed = answer.header(StageSealResponseHeader)
        return StagedAttempt(self._name.attempt, sealed.file_bytes, sealed.record_count)


def send_block(link: BrokerLink, topic: str, queue_id: int, block: EncodedBlock) -> None:
    """Send records of a queue to a headrace broker, readable at once."""
    header = BulkSendHeader(
        **_target(topic, queue_id),
        producer_group=GROUP,
        count=block.record_count,
        body_crc32=crc32(block.body),
    )
    link.send(RequestCode.BULK_SEND, header, block.body)


def send_outgoing(link: BrokerLink, topic: str, queue_id: int, outgoing: Outgoing) -> None:
    """Send records of a queue to any broker, readable at once."""
    header = SendMessageHeaderV2(
        **_target(topic, queue_id),
        producer_group=GROUP,
        sys_flag=outgoing.sys_flag,
        born_timestamp=outgoing.born_timestamp_ms,
        flag=0,
        properties=msgspec.json.decode(outgoing.properties_json, type=str),
        batch=outgoing.is_batch,
    )
    is_batch = outgoing.is_batch
    code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
    link.send(code, header, outgoing.body)


def _target(topic: str, queue_id: int) -> dict[str, Any]:
    return {
        "topic": topic,
        "queue_id": queue_id,
        "default_topic": DEFAULT_TOPIC,
        "default_topic_queue_nums": DEFAULT_TOPIC_QUEUES,
    }
