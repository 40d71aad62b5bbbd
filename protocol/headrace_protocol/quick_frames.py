"""Frames of plain sends and pulls, read and written by templates instead of the general codecs.

Each says what the general codec reads or writes; a test compares them.
Source: docs/protocol.md "Send", "Pull"; tests/protocol/test_quick_frames.py.
"""

from __future__ import annotations

import msgspec

from headrace_protocol.command import VERSION
from headrace_protocol.frame import LENGTH_BYTES, PREFIX, frame_prefix
from headrace_protocol.header_codecs import SerializeType
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations

# Queue id, offset_delta, UNIQ_KEY (only letters and digits, since it is not escaped), opaque.
SendAnswer = tuple[int, int, str, int]


class SendFields(msgspec.Struct, gc=False, kw_only=True):
    """The fields of SendMessageHeaderV2 that a plain message needs."""

    topic: str = msgspec.field(name="b")
    queue_id: Int32 = msgspec.field(name="e")
    sys_flag: Int32 = msgspec.field(name="f")
    born_timestamp: Int64 = msgspec.field(name="g")
    flag: Int32 = msgspec.field(name="h")
    properties: str = msgspec.field(name="i")
    reconsume_times: Int32 = msgspec.field(name="j", default=0)
    batch: bool = msgspec.field(name="m", default=False)


class SendCommand(msgspec.Struct, gc=False):
    """A SEND_MESSAGE_V2 request: header and extension fields, decoded in one pass."""

    fields: SendFields = msgspec.field(name="extFields")
    opaque: Int32 = 0
    flag: Int32 = 0


decode_send = msgspec.json.Decoder(SendCommand, strict=False).decode


class SignedFields(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    """All fields of a signed SEND_MESSAGE_V2 request: a signature counts those that it leaves out.

    One with others is served by itself.
    """

    access_key: str = msgspec.field(name="AccessKey")
    security_token: str = msgspec.field(name="SecurityToken", default="")
    signature: str = msgspec.field(name="Signature")
    a: str = ""
    b: str = ""
    c: str = ""
    d: str = ""
    e: str = ""
    f: str = ""
    g: str = ""
    h: str = ""
    i: str = ""
    j: str = ""
    k: str = ""
    l: str = ""  # noqa: E741 - its name on the wire
    m: str = ""
    n: str = ""

    def text(self) -> str:
        """The signed text of the fields, as ``rights.signature.signed_text``."""
        return "".join(
            (
                *(self.access_key, self.security_token),
                *(self.a, self.b, self.c, self.d, self.e, self.f, self.g),
                *(self.h, self.i, self.j, self.k, self.l, self.m, self.n),
            )
        )


class SignedSend(msgspec.Struct, gc=False):
    """What a signature of a SEND_MESSAGE_V2 request is about; see ``rights.signature``."""

    fields: SignedFields = msgspec.field(name="extFields")


decode_signed = msgspec.json.Decoder(SignedSend).decode
# Errors of both decoders.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def send_replies(
    store_host_hex: str,
    answers: list[SendAnswer],
    offsets: list[tuple[int, int]],
    code: int,
    remark: str = "",
) -> bytes:
    """The replies to sends as one buffer, each with what the general encoder would write.

    offsets: physical offset and queue offset of the first messages; the others get no reply.
    """
    remark = f'"remark":"{remark}",' if remark else ""
    parts: list[str] = []
    for (queue_id, delta, uniq_key, opaque), (physical_offset, queue_offset) in zip(
        answers, offsets, strict=False
    ):
        header = (
            f'{{"code":{code},"extFields":{{"queueId":"{queue_id}","transactionId":"{uniq_key}",'
            f'"msgId":"{store_host_hex}{physical_offset:016X}","TRACE_ON":"true",'
            f'"MSG_REGION":"DefaultRegion","queueOffset":"{queue_offset + delta}"}},"flag":1,'
            f'"language":"PYTHON","opaque":{opaque},{remark}'
            f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
        )
        try:
            parts += (_PREFIXES[len(header)], header)
        except IndexError:
            parts += (_prefix(len(header)), header)
    return "".join(parts).encode("latin-1")


def _prefix(header_bytes: int) -> str:
    """The eight bytes before a JSON header without body."""
    return PREFIX.pack(header_bytes + LENGTH_BYTES, header_bytes).decode("latin-1")


# By header length; only an absurdly long UNIQ_KEY exceeds it.
_PREFIXES = [_prefix(header_bytes) for header_bytes in range(1024)]


_FOUND = (
    b'{"code":0,"extFields":{"suggestWhichBrokerId":"0","groupSysFlag":"0",'
    b'"nextBeginOffset":"%d","maxOffset":"%d","minOffset":"%d",%b"topicSysFlag":"0"},"flag":1,'
    b'"language":"PYTHON","opaque":%d,"remark":"FOUND","serializeTypeCurrentRPC":"JSON",'
    b'"version":513}'
)


def pull_found(
    offsets: tuple[int, int, int], offset_delta: int, opaque: int, body_bytes: int
) -> bytes:
    """The answer to a pull that found messages, up to its body.

    offsets: the next one, maximum and minimum.
    """
    delta = b'"offsetDelta":"%d",' % offset_delta if offset_delta else b""
    header = _FOUND % (*offsets, delta, opaque)
    return frame_prefix(SerializeType.JSON, len(header), body_bytes) + header
