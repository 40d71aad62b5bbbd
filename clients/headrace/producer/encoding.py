"""Send requests from a template: per message only what differs is filled in.

The header is always JSON, which every server reads; a frame says itself how its header is coded.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from headrace_protocol.codes import RequestCode
from headrace_protocol.command import FLAG_ONEWAY, VERSION
from headrace_protocol.frame import LENGTH_BYTES

if TYPE_CHECKING:
    from headrace_protocol.connection import Body

# The topic whose settings a broker copies when a send makes a new topic.
DEFAULT_TOPIC = "TBW102"
DEFAULT_TOPIC_QUEUES = 4

_json = msgspec.json.Encoder().encode
# Serialize type 0 (JSON) leaves the second word's high byte empty: it is the header's length.
_PREFIX = struct.Struct(">II")


class SendTemplate:
    """Frames of SEND_MESSAGE_V2, or SEND_BATCH_MESSAGE, for one queue."""

    __slots__ = ("_template", "code")

    def __init__(
        self, group: str, topic: str, broker_name: str, queue_id: int, *, batch: bool = False
    ) -> None:
        self.code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
        header = {
            "code": int(self.code),
            "extFields": {
                "a": group,
                "b": topic,
                "c": DEFAULT_TOPIC,
                "d": str(DEFAULT_TOPIC_QUEUES),
                "e": str(queue_id),
                "f": "SYS_FLAG",
                "g": "BORN_TIMESTAMP",
                "h": "0",
                "i": "PROPERTIES",
                "j": "0",
                "k": "false",
                "m": "true" if batch else "false",
                "n": broker_name,
            },
            "flag": "FLAG",
            "language": "PYTHON",
            "opaque": "OPAQUE",
            "serializeTypeCurrentRPC": "JSON",
            "version": VERSION,
        }
        # A retry topic's name begins with the character that the template gives a meaning to.
        self._template = (
            _json(header)
            .replace(b"%", b"%%")
            .replace(b'"SYS_FLAG"', b'"%d"')
            .replace(b'"BORN_TIMESTAMP"', b'"%d"')
            .replace(b'"PROPERTIES"', b"%b")
            .replace(b'"FLAG"', b"%d")
            .replace(b'"OPAQUE"', b"%d")
        )

    def frame(self, outgoing: Outgoing, opaque: int, flag: int = 0) -> list[Body]:
        """The buffers of one request, in order."""
        header = self._template % (
            outgoing.sys_flag,
            outgoing.born_timestamp_ms,
            outgoing.properties_json,
            flag,
            opaque,
        )
        body = outgoing.body
        header_bytes = len(header)
        length = LENGTH_BYTES + header_bytes + len(body)
        return [_PREFIX.pack(length, header_bytes), header, body]

    def oneway_frame(self, outgoing: Outgoing) -> list[Body]:
        """The buffers of a request that gets no answer."""
        return self.frame(outgoing, 0, FLAG_ONEWAY)


class Outgoing:
    """What goes over the wire for a message or a batch, to whichever queue it is sent.

    message_id: the client's id; those of a batch are joined by commas.
    """

    __slots__ = (
        "body",
        "born_timestamp_ms",
        "is_batch",
        "message_count",
        "message_id",
        "properties_json",
        "sys_flag",
    )

    def __init__(
        self,
        body: Body,
        sys_flag: int,
        born_timestamp_ms: int,
        properties: str,
        message_id: str,
        message_count: int = 1,
        *,
        is_batch: bool = False,
    ) -> None:
        self.body = body
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.properties_json = _json(properties)
        self.message_id = message_id
        self.message_count = message_count
        self.is_batch = is_batch
