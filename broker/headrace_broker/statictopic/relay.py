"""Pulls of items on other brokers: records are fetched there, and read ahead.

A pull fetches what it asks for. Where a reader continues, larger blocks are fetched before it asks,
since the messages of an item never change.
Source: docs/static-topics.md "Items on other brokers";
tests/broker/statictopic/test_static_reader.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from headrace_broker.peers.callers import ITEMS
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.answer import Answer, MalformedField
from headrace_broker.statictopic.blocks import (
    Blocks,
    BulkBlock,
    MalformedRecords,
    RecordBlock,
    records_of,
)
from headrace_broker.statictopic.offsets import away
from headrace_broker.statictopic.rows import ROWS, add_subscription, physical_fields
from headrace_broker.store.store_source import GetResult, GetStatus
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.columns import UNIT_DTYPE
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.errors import RequestError
from headrace_protocol.waiting import NotHere, Until

if TYPE_CHECKING:
    from headrace_broker.peers.peers import Outcome, Peers
    from headrace_broker.statictopic.blocks import Block
    from headrace_broker.statictopic.reader import Part, StaticReader, Wanted
    from headrace_broker.statictopic.rows import Subscription
    from headrace_protocol.serving import Channel, Request
    from headrace_protocol.waiting import Run

_COMMIT_OFFSET: Final = 0x1
_SUSPEND: Final = 0x2
# Room for an answer whose request does not say how long it may be; what brokers return then.
_ANSWER_BYTES: Final = 256 * 1024
# Java's clients ask for up to 2 GiB. What an answer is charged with must be what it may have.
_ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
# Each block has so many times the messages of the one before, up to a size and what brokers return.
_GROWTH: Final = 8
_COUNT_MAX: Final = 4096
_BLOCK_BYTES: Final = 512 * 1024

_CODES: Final = {
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
_OUTSIDE: Final = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED})


class _Pull(NamedTuple):
    """A pull that waits for an answer of the item's broker."""

    reader: StaticReader
    part: Part
    offset: int
    run: Run


class _Fetch(NamedTuple):
    """A request for a block. channel: is charged for it. fields: of the client's pull."""

    wanted: Wanted
    part: Part
    offset: int
    code: int
    fields: dict[str, str]
    channel: Channel

    @property
    def count_max(self) -> int:
        """Most messages of the answer."""
        return int(self.fields["maxMsgNums"])

    @property
    def bytes_max(self) -> int:
        """Most bytes of its records."""
        return int(self.fields["maxMsgBytes"])

    @property
    def answer_bytes(self) -> int:
        """Room for the answer; the first record comes whatever its size."""
        return max(self.bytes_max, _ANSWER_BYTES)


class Relay:
    """Reads items of other brokers.

    relayed_count, relayed_bytes: pulls, and bytes fetched for them, for the runtime info.
    """

    def __init__(self, peers: Peers, subscription: Subscription) -> None:
        self.relayed_count = self.relayed_bytes = 0
        self.blocks = Blocks()
        self._peers = peers
        self._subscription = subscription
        # Pulls that wait for a block, by the block and its first offset.
        self._waiting: dict[tuple[Wanted, int], list[_Pull]] = {}

    def read(
        self,
        reader: StaticReader,
        part: Part,
        offset: int,
        count_max: int,
        bytes_max: int,
        wanted: Wanted,
    ) -> GetResult:
        """Records that were fetched. Raises NotHere without any."""
        found = self.blocks.get(wanted, offset, count_max, bytes_max)
        if found is None:
            begin = partial(self._pull, reader, part, offset, wanted)
            raise NotHere(Until(f"broker {part.item.bname}", begin))
        self.relayed_count += 1
        return found

    # -- requests ----------------------------------------------------------------------------------

    def _pull(
        self, reader: StaticReader, part: Part, offset: int, wanted: Wanted, run: Run
    ) -> None:
        """Have a pull wait for the answer of the item's broker."""
        request = run.request
        waiting = self._waiting.get((wanted, offset))
        ask = None
        if waiting is None:
            fields = self._fields(part, offset, request)
            ask = _Fetch(wanted, part, offset, request.command.code, fields, request.channel)
            waiting = []
        waiting.append(_Pull(reader, part, offset, run))
        if ask is not None:
            self._fetch(ask, waiting)

    def _fields(self, part: Part, offset: int, request: Request) -> dict[str, str]:
        code, fields = request.command.code, request.command.ext()
        flags = _number(fields, "sysFlag") & ~(_COMMIT_OFFSET | _SUSPEND)
        fields["sysFlag"] = str(flags)
        add_subscription(fields, self._subscription)
        count_max = max(min(_number(fields, "maxMsgNums"), part.end - offset), 1)
        fields["maxMsgNums"] = str(count_max)
        bytes_max = _number(fields, "maxMsgBytes")
        if code != RequestCode.BULK_PULL:
            bytes_max = max(bytes_max, _ANSWER_BYTES)
        fields["maxMsgBytes"] = str(min(bytes_max, _ANSWER_BYTES_MAX))
        item = part.item
        return physical_fields(ROWS[code], fields, item.bname, item.queue_id, offset)

    def _fetch(self, ask: _Fetch, waiting: list[_Pull]) -> None:
        self._waiting[ask.wanted, ask.offset] = waiting
        asked = Ask(
            ask.part.item.bname,
            ask.code,
            ask.fields,
            answer_bytes=ask.answer_bytes,
            payer=ask.channel,
        )
        self._peers.begin(ITEMS, asked, partial(self._fetched, ask))

    def _fetch_ahead(self, ask: _Fetch, offset: int) -> None:
        """Fetch the block at an offset, behind the one that was asked for."""
        part, fields = ask.part, dict(ask.fields)
        if not ask.wanted.is_bulk:
            fields["maxMsgNums"] = str(min(_GROWTH * ask.count_max, _COUNT_MAX))
            fields["maxMsgBytes"] = str(_BLOCK_BYTES)
        fields["maxMsgNums"] = str(min(int(fields["maxMsgNums"]), part.end - offset))
        fields[ROWS[ask.code].offset] = str(offset)
        ahead = ask._replace(offset=offset, fields=fields)
        is_wanted = ask.channel.is_open and (ask.wanted, offset) not in self._waiting
        if is_wanted and self.blocks.has_room(ahead.answer_bytes):
            self._fetch(ahead, [])

    # -- answers -----------------------------------------------------------------------------------

    def _fetched(self, ask: _Fetch, outcome: Outcome) -> None:
        pulls = self._waiting.pop((ask.wanted, ask.offset))
        found = outcome if isinstance(outcome, HeadraceError) else Answer.of(outcome)
        if isinstance(found, Answer):
            self.relayed_bytes += sum(map(len, found.body))
            if found.code == ResponseCode.SUCCESS:
                try:
                    self._keep(ask, found)
                except MalformedField as error:
                    found = Answer(error.code, error.remark)
        for pull in pulls:
            self._answer(pull, found)

    def _keep(self, ask: _Fetch, answer: Answer) -> None:
        """Keep the records of an answer for the pulls that want them. Raises MalformedField."""
        part = ask.part
        end = min(_next_begin(answer, part, ask.offset), part.end)
        try:
            block = _block(ask, answer, end)
        except MalformedRecords as error:
            item = part.item
            raise MalformedField(
                f"{error} in the answer of {item.bname} to a pull of its queue {item.queue_id} at "
                f"{ask.offset}"
            ) from None
        is_closed = part.next_start is not None
        fetch_next = partial(self._fetch_ahead, ask, end) if is_closed and end < part.end else None
        self.blocks.put(ask.wanted, block, ask.channel, fetch_next)

    def _answer(self, pull: _Pull, outcome: Answer | HeadraceError) -> None:
        """Answer a pull, or have it read again what is known now."""
        if not pull.run.request.channel.is_open:
            gone = RequestError(ResponseCode.SYSTEM_ERROR, "the client has disconnected")
            pull.run.called_back(gone)
            return
        answer: Answer | None
        if isinstance(outcome, HeadraceError):
            part, stop = pull.part, pull.part.next_start
            answer = away(part.item.bname, part.start, -1 if stop is None else stop, outcome)
        else:
            try:
                answer = self._static(pull, outcome)
            except MalformedField as error:
                answer = Answer(error.code, error.remark)
            except RequestError:  # this broker no longer leads the queue
                answer = None
        self.relayed_count += answer is not None
        pull.run.resume(answer and answer.reply)

    def _static(self, pull: _Pull, answer: Answer) -> Answer | None:
        """An answer with static offsets; None if it has records, or the pull must wait.

        Raises MalformedField, RequestError if this broker no longer leads the queue.
        """
        code, (reader, part, offset, *_) = answer.code, pull
        if code == ResponseCode.SUCCESS:
            return None
        if code not in _CODES.values():
            return answer
        next_offset = min(_next_begin(answer, part, offset), part.end) + part.delta
        if code in _OUTSIDE:
            highest = answer.number("maxOffset")
            status, next_offset = part.outside(offset, answer.number("minOffset"), highest)
            if status is GetStatus.OFFSET_OVERFLOW_ONE:
                reader.note_end(part, min(highest, offset))
                return None
            code = _CODES[status]
        lowest, highest = reader.known_range()
        fields = {
            **answer.fields,
            "nextBeginOffset": next_offset,
            "minOffset": lowest,
            "maxOffset": highest,
            "offsetDelta": part.delta,
        }
        return Answer(code, answer.remark, fields)


def _block(ask: _Fetch, answer: Answer, end: int) -> Block:
    """The records of an answer. Raises MalformedRecords, MalformedField."""
    body = records_of(answer.body)
    if not ask.wanted.is_bulk:
        return RecordBlock(ask.offset, end, body)
    fields, count = answer.fields, answer.number("count")
    if not 0 < count <= ask.count_max or count * UNIT_DTYPE.itemsize > len(body):
        raise MalformedRecords(f"{count} records in {len(body)} bytes")
    record_bytes = int(np.frombuffer(body, UNIT_DTYPE, count)["size"].sum(dtype=np.int64))
    if count > 1 and record_bytes > ask.bytes_max:
        raise MalformedRecords(f"{record_bytes} bytes of records, more than {ask.bytes_max}")
    result = GetResult(
        GetStatus.FOUND,
        (body,),
        count,
        record_bytes,
        end,
        0,
        end,
        "log" if fields.get("layout") == "log" else "gathered",
        answer.number("firstPhysicalOffset"),
        str(fields.get("hasQueueOffsets")).lower() == "true",
    )
    return BulkBlock(ask.offset, result)


def _next_begin(answer: Answer, part: Part, offset: int) -> int:
    """Where its broker continues. Raises MalformedField if a reader would never get on."""
    found = answer.number("nextBeginOffset")
    if found < offset + (answer.code == ResponseCode.SUCCESS) and answer.code not in _OUTSIDE:
        item = part.item
        raise MalformedField(
            f"nextBeginOffset={found} in the answer of {item.bname} to a pull of its queue "
            f"{item.queue_id} at {offset}"
        )
    return found


def _number(fields: dict[str, str], name: str) -> int:
    # The processor has decoded these fields of the header before, with the same rules.
    return msgspec.convert(fields.get(name) or "0", int, strict=False)
