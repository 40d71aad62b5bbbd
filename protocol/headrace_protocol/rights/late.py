"""Rights that only the function of a request can judge.

They are those to messages that it finds, to names that an answer lists, and to topics and groups
that the request creates. Source: docs/security.md "What is checked"; tests/broker/access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.message import REAL_TOPIC, decode_record
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.system_topics import is_own_topic
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_protocol.frame import Buffer
    from headrace_protocol.message import StoredMessage
    from headrace_protocol.serving import Request

Item = TypeVar("Item")
# One of them is enough to read a message that was found, or to see a name in a list.
READ: Final = (Action.SUB, Action.GET)
SEE: Final = (*READ, Action.PUB, Action.CREATE, Action.UPDATE, Action.DELETE)
# Decisions between two looks at the time, half a millisecond.
_AT_ONCE: Final = 64


def sees_all(request: Request) -> bool:
    """True if answers to a request need no look at each name."""
    return request.rights is None


async def visible_topics(
    request: Request, items: Iterable[Item], name: Callable[[Item], str]
) -> Iterable[Item]:
    """The items whose topics the client may see, in slices.

    items: must not change meanwhile. name: the topic of an item.
    """
    return await _visible(request, Kind.TOPIC, items, name)


async def visible_groups(
    request: Request, items: Iterable[Item], name: Callable[[Item], str]
) -> Iterable[Item]:
    """The items whose groups the client may see; see ``visible_topics``."""
    return await _visible(request, Kind.GROUP, items, name)


async def _visible(
    request: Request, kind: Kind, items: Iterable[Item], name: Callable[[Item], str]
) -> Iterable[Item]:
    if sees_all(request):
        return items
    found = []
    for number, item in enumerate(items, 1):
        if request.may(kind, name(item), *SEE):
            found.append(item)
        if not number % _AT_ONCE:
            await take_break()
    return found


def real_topic(message: StoredMessage) -> str:
    """The topic of a message, also while it waits in a topic of the broker's own."""
    if not is_own_topic(message.topic):
        return message.topic
    return message.properties.get(REAL_TOPIC, message.topic)


def check_readable(request: Request, record: Buffer) -> None:
    """Raise RequestError unless the client may read a record that was found."""
    if not sees_all(request):
        request.check(Kind.TOPIC, real_topic(decode_record(record)), *READ)


def check_create(request: Request, kind: Kind, name: str) -> None:
    """Raise RequestError unless the client may create what does not exist."""
    if not request.may_create(kind, name):
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"{request.subject} has no permission to access {kind.value}:{name}: it does not "
            "exist, creating it needs Create",
        )
