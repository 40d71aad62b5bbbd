"""Requests to the members of a group to continue at other offsets.

Source: docs/protocol.md "Groups"; tests/broker/processors/test_admin_groups.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_protocol import fastjson
from headrace_protocol.codes import RequestCode
from headrace_protocol.header_codecs import notice
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.consumer.groups import Member
    from headrace_protocol.admin_headers import ResetOffsetHeader
    from headrace_protocol.bodies import MessageQueue

_CPP: Final = "CPP"


async def request_seek(
    members: Iterable[Member],
    header: ResetOffsetHeader,
    rows: Callable[[], Iterable[tuple[MessageQueue, int]]],
) -> None:
    """Send RESET_CONSUMER_CLIENT_OFFSET, in slices. rows: the offsets of the queues."""
    notices: dict[bool, tuple[bytes, ...]] = {}
    for member in members:
        is_cpp = member.language == _CPP
        if is_cpp not in notices:
            body = await _body(rows(), is_cpp=is_cpp)
            notices[is_cpp] = notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, *body)
        member.channel.write(*notices[is_cpp])
        await take_break()


async def _body(rows: Iterable[tuple[MessageQueue, int]], *, is_cpp: bool) -> tuple[bytes, ...]:
    """C++ clients read a list in place of a map."""
    if is_cpp:
        listed = ({**msgspec.to_builtins(queue), "offset": offset} for queue, offset in rows)
        written = await fastjson.dumps_list_sliced(listed)
    else:
        written = await fastjson.dumps_sliced(rows)
    return fastjson.dumps_parts({"offsetTable": written})
