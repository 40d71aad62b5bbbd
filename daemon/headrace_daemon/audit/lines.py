"""Lines of an audit log: JSON objects that hold the SHA-256 of the line before.

An event is encoded in the loop. The thread that writes it adds its number and the hash, so a chain
has no gap where events were dropped. Source: docs/security.md "Audit log".
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

# Events about the log itself.
CONTINUED: Final = "log.continued"
LOST: Final = "log.lost"

_START: Final = b'{"time":"'
_DAY: Final = slice(len(_START), len(_START) + len("2026-11-27"))


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event.

    time: UTC, ISO 8601 with milliseconds. daemon: kind and name of the daemon.
    user: None if nobody has logged in. address: host:port of the client.
    request, code: name and number of the request. resources: "Topic:orders", ...
    outcome: name of the response code. detail: further values of this kind of event.
    """

    time: str
    daemon: str
    event: str
    user: str | None = None
    address: str | None = None
    request: str | None = None
    code: int | None = None
    resources: tuple[str, ...] = ()
    outcome: str | None = None
    detail: dict[str, Any] = {}


class Link(NamedTuple):
    """The end of a chain: number and hash of its last line."""

    number: int
    hash: str


# Before the first line.
NOTHING: Final = Link(0, "0" * 64)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a written line that make the chain."""

    time: str
    event: str
    detail: dict[str, Any]
    number: int
    previous: str


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Line).decode


def hash_of(line: bytes) -> str:
    """The hash of a line without its end."""
    return sha256(line).hexdigest()


def chained(event: bytes, end: Link) -> bytes:
    """An encoded event as the next line of a chain, without a line end."""
    return b'%b,"number":%d,"previous":"%b"}' % (event[:-1], end.number + 1, end.hash.encode())


def day_of(line: bytes) -> bytes:
    """The day of an event or line, as 2026-11-27."""
    return line[_DAY]


def link_of(line: bytes) -> Link:
    """The end of a chain that ends in ``line``; number 0 if somebody has made it unreadable."""
    try:
        number = decode(line).number
    except (msgspec.DecodeError, UnicodeDecodeError):
        number = 0
    return Link(number, hash_of(line))


def is_beginning(data: bytes) -> bool:
    """True if an audit log may begin with ``data``, of which a crash may have kept a part."""
    return data[: len(_START)] == _START[: len(data)]
