"""Pulls of items on other brokers: asked for there, and answered with the bytes as they come.

Source: docs/static-topics.md "Items on other brokers"; tests/broker/test_static_reader.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.statictopic.forward import reply_with
from headrace_broker.statictopic.remote import Answer, MalformedField
from headrace_broker.statictopic.rows import ROWS, add_subscription, physical_fields
from headrace_broker.store.store_source import GetStatus
from headrace_protocol.codes import ResponseCode
from headrace_protocol.drivers.errors import HeadraceError
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace_broker.statictopic.reader import Part, StaticReader
    from headrace_broker.statictopic.remote import OtherBrokers
    from headrace_broker.statictopic.rows import Subscription
    from headrace_protocol.serving import Registry, Request

_COMMIT_OFFSET: Final = 0x1
_SUSPEND: Final = 0x2
# Room for an answer whose request does not say how long it may be; what brokers return then.
_ANSWER_BYTES: Final = 256 * 1024
# Java's clients ask for up to 2 GiB. What an answer is charged with must be what it may have.
_ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024

_CODES: Final = {
    GetStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
_OUTSIDE: Final = frozenset({ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_OFFSET_MOVED})


class Relay:
    """Relays pulls.

    relayed_count: for the runtime info.
    """

    registry: Registry

    def __init__(self, brokers: OtherBrokers, subscription: Subscription) -> None:
        self.relayed_count = 0
        self._brokers = brokers
        self._subscription = subscription

    def pull(self, reader: StaticReader, part: Part, offset: int, request: Request) -> None:
        """Take a pull over, and answer it with what the item's broker answers."""
        self.relayed_count += 1
        fields = self._fields(part, offset, request)
        answer_bytes = _number(fields, "maxMsgBytes")
        held_bytes = request.held_bytes + answer_bytes
        request.channel.charge(held_bytes)
        then = partial(self._answered, reader, part, offset, request, held_bytes)
        self._brokers.ask(
            part.item.bname, request.command.code, fields, then, answer_bytes=answer_bytes
        )

    def _fields(self, part: Part, offset: int, request: Request) -> dict[str, str]:
        code, fields = request.command.code, request.command.ext()
        flags = _number(fields, "sysFlag") & ~(_COMMIT_OFFSET | _SUSPEND)
        fields["sysFlag"] = str(flags)
        add_subscription(fields, self._subscription)
        count_max = max(min(_number(fields, "maxMsgNums"), part.end - offset), 1)
        fields["maxMsgNums"] = str(count_max)
        bytes_max = max(_number(fields, "maxMsgBytes"), _ANSWER_BYTES)
        fields["maxMsgBytes"] = str(min(bytes_max, _ANSWER_BYTES_MAX))
        item = part.item
        return physical_fields(ROWS[code], fields, item.bname, item.queue_id, offset)

    def _answered(
        self,
        reader: StaticReader,
        part: Part,
        offset: int,
        request: Request,
        held_bytes: int,
        outcome: Answer | HeadraceError,
    ) -> None:
        request.channel.charge(-held_bytes)
        if not request.channel.is_open:
            return
        if isinstance(outcome, HeadraceError):
            reply_with(request, outcome)
            return
        try:
            answer = self._static(reader, part, offset, outcome)
        except MalformedField as error:
            answer = Answer(ResponseCode.SYSTEM_ERROR, str(error))
        except RequestError:  # this broker no longer leads the queue
            answer = None
        if answer is None:
            self.registry.serve_again(request)
        else:
            reply_with(request, answer)

    def _static(
        self, reader: StaticReader, part: Part, offset: int, answer: Answer
    ) -> Answer | None:
        """The answer with static offsets; None for a pull that must wait at the item's end.

        Raises RequestError if this broker no longer leads the queue.
        """
        code = answer.code
        if code not in {*_CODES.values(), ResponseCode.SUCCESS}:
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
        return Answer(code, answer.remark, fields, answer.body)


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
