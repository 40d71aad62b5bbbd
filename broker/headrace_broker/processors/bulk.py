"""BULK_SEND and BULK_PULL: blocks of whole records, between headrace and its own clients.

Per-record work happens only in C. Source: docs/protocol.md "Bulk".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from zlib_ng.zlib_ng import crc32

from headrace_broker.processors.send_answers import rejection
from headrace_broker.store.errors import StoreError
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import UNIT_DTYPE, split
from headrace_protocol.errors import CorruptRecord, RequestError
from headrace_protocol.headers import (
    BulkPullHeader,
    BulkPullResponseHeader,
    BulkSendHeader,
    SendMessageResponseHeader,
)
from headrace_protocol.message_ids import encode_offset_message_id
from headrace_protocol.serving import Reply
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from headrace_broker.message_demands import MessageDemands
    from headrace_broker.processors.pull import PullProcessor, PullTarget
    from headrace_broker.processors.send import SendProcessor, SendTarget
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_source import GetResult
    from headrace_protocol.serving import Registry, Request, Work

# Half of the dispatch ring.
_COUNT_MAX = 65_536
_RECORDS_BYTES_MAX = 8 * 1024 * 1024


class BulkProcessor:
    """Stores and returns blocks of records, by the rules for single messages."""

    def __init__(
        self,
        store: MessageStore,
        sends: SendProcessor,
        pulls: PullProcessor,
        demands: MessageDemands,
        statistics: BrokerStatistics,
    ) -> None:
        self._store = store
        self._sends = sends
        self._pulls = pulls
        self._demands = demands
        self._statistics = statistics

    def register(self, registry: Registry) -> None:
        """Route both requests."""
        registry.route(RequestCode.BULK_SEND, self.send)
        registry.route(RequestCode.BULK_PULL, self.pull)

    # -- BULK_SEND ---------------------------------------------------------------------------------

    def send(self, request: Request) -> Reply | None:
        """Store all records of a block, or none."""
        header = request.header(BulkSendHeader)
        records, target = self.check(request, header)
        try:
            queue_offset, physical_offset = self._store.write_path.append_records(records)
        except StoreError as error:
            raise rejection(error, header.topic) from None
        self._statistics.put(header.topic, header.count, records.body_bytes)
        answer = SendMessageResponseHeader(
            msg_id=encode_offset_message_id(self._store.settings.store_host, physical_offset),
            queue_id=target.queue_id,
            queue_offset=target.client_offset(queue_offset),
        )
        return self._sends.reply_confirmed(request, Reply(answer))

    def check(self, request: Request, header: BulkSendHeader) -> tuple[EncodedRecords, SendTarget]:
        """The checked records of a request, and where they go.

        Raises RequestError.
        """
        self._check_header(header)
        _check_body(request, header)
        target = self._sends.target(request, header)
        try:
            records = EncodedRecords(target.queue, header.count, request.body, target.sys_flag)
        except CorruptRecord as error:
            raise rejection(error, header.topic) from None
        self._demands.check_block(
            header.topic,
            target.queue.queue_id,
            list(records.distinct_properties),
            target.demand,
            record_bytes=records.record_bytes_max if target.demand else 0,
        )
        return records, target

    def _check_header(self, header: BulkSendHeader) -> None:
        if len(self._store.settings.store_host) != 8:
            raise RequestError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                "blocks of records are not served by a broker with an IPv6 address: "
                "send the messages one by one",
            )
        if header.topic.startswith(RETRY_PREFIX):
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a block to the retry topic {header.topic}: send its messages one by one",
            )
        if header.count > _COUNT_MAX:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a block of {header.count} messages: the maximum is {_COUNT_MAX}, send fewer",
            )

    # -- BULK_PULL ---------------------------------------------------------------------------------

    def pull(self, request: Request) -> Reply | Work | None:
        """Answer with records and their positions, or hold the request until some arrive."""
        header = request.header(BulkPullHeader)
        target = self._pulls.target(request, header, header.subscription)
        return self._pulls.serve(request, header, target, self._get, _found)

    def _get(self, header: BulkPullHeader, target: PullTarget, queue_offset: int) -> GetResult:
        return target.reader.get_bulk(
            queue_offset,
            min(max(header.max_msg_nums, 1), _COUNT_MAX),
            min(header.max_msg_bytes, _RECORDS_BYTES_MAX),
            target.tags,
        )


def _check_body(request: Request, header: BulkSendHeader) -> None:
    if header.body_crc32 is None:
        return
    crc = crc32(request.body)
    if crc != header.body_crc32:
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"a block to {header.topic} was damaged in transit: its CRC-32 is {crc}, "
            f"not {header.body_crc32}; nothing was stored, send it again",
        )


def _gathered(result: GetResult) -> GetResult:
    """The records alone: a range of the log may have those of other topics between them."""
    at = 2 if result.has_queue_offsets else 1
    head, records = result.buffers[:at], result.buffers[at:]
    if result.layout == "gathered" or sum(map(len, records)) == result.body_bytes:
        return result
    units = np.frombuffer(head[0], UNIT_DTYPE)
    starts = units["physical_offset"].astype(np.int64) - result.first_physical_offset
    pieces = split(b"".join(records), starts, units["size"].astype(np.int64))
    return result._replace(layout="gathered", buffers=[*head, b"".join(pieces)])


def _found(request: Request, code: ResponseCode, result: GetResult) -> Reply:
    if request.subject is not None and result.count:
        result = _gathered(result)
    return Reply(
        BulkPullResponseHeader(
            next_begin_offset=result.next_offset,
            min_offset=result.min_offset,
            max_offset=result.max_offset,
            count=result.count,
            layout=result.layout,
            first_physical_offset=result.first_physical_offset,
            has_queue_offsets=result.has_queue_offsets,
            offset_delta=result.offset_delta,
        ),
        tuple(result.buffers),
        code,
        result.status.name,
    )
