"""The promise: any bytes give the same frames or RemoteProtocolError, however they are cut.

What the frames hold is read as the daemons and clients read it: by the registry of request
functions, by typed headers, JSON bodies, records and batches. Nothing but the errors that those
name may come out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store.log.batch_records import BatchRecords
from headrace_broker.store.log.uniform_batch import UniformBatch
from headrace_broker.store.queues.consume_queue import UNIT_BYTES, ConsumeQueue
from headrace_broker.store.store_queue import StoreQueue
from headrace_protocol.codes import RequestCode
from headrace_protocol.compression import CodecMissing
from headrace_protocol.errors import CorruptRecord, RemoteProtocolError
from headrace_protocol.fastjson import MalformedJson
from headrace_protocol.frame import FRAME_BYTES_MAX, Buffer, Frame, FrameReader
from headrace_protocol.header_codecs import decode_header
from headrace_protocol.message import decode_records
from headrace_protocol.nameserver_headers import RegisterBrokerHeader
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.rights.proofs import Proof
from headrace_protocol.serving import Registry, Reply, Request
from headrace_protocol.statictopic.mapping import decode_detail
from tests.fuzz.corpus import Seed
from tests.support.wire_types import (
    RECORD_RESPONSES,
    REQUEST_BODIES,
    REQUEST_HEADERS,
    RESPONSE_BODIES,
    RESPONSE_HEADERS,
)


class PromiseBroken(Exception):
    """Bytes were found that the protocol does not read as it says.

    data: the frame or the stream.
    """

    def __init__(self, reason: str, data: bytes) -> None:
        super().__init__(reason)
        self.data = data


class Channel:
    """A client of the registry that keeps what it was sent."""

    address = "127.0.0.1:1"
    ip = "127.0.0.1"
    host_bytes = bytes(8)
    user: str | None = None
    signer: str | None = None
    proof: Proof | None = None
    login: Any = None
    certificate: bytes | None = None
    is_encrypted = False
    is_open = True
    is_slow = False
    on_drained: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.is_greeted = False
        self.attachments: dict[str, Any] = {}
        self.written: list[bytes | bytearray | memoryview] = []

    def greet(self) -> None:
        self.is_greeted = True

    def log_in(self, user: str, proof: Proof | None = None) -> None:
        self.user, self.proof = user, proof

    def charge(self, added_bytes: int) -> None:
        """Nothing is bounded here."""

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        self.written += buffers

    def when_lost(self, notify: Callable[[], None]) -> None:
        """Nothing is lost here."""


class Reader:
    """Reads streams of frames in every way that the protocol knows."""

    def __init__(self) -> None:
        self._registry = Registry(_unexpected)
        for code in RequestCode:
            if code is not RequestCode.HEADRACE_HELLO:
                self._registry.route(code, _serve)

    def check(self, stream: bytes, cuts: list[int], seeds: list[Seed]) -> int:
        """Keep the promise for one stream; return how many frames came out of it.

        seeds: what the frames were made of, in order.
        """
        whole = read(stream, [])
        frames, has_error, partial_bytes = read(stream, cuts)
        if not _same((frames, has_error, partial_bytes), whole):
            raise PromiseBroken(f"cut at {cuts} the stream reads otherwise than whole", stream)
        if partial_bytes > FRAME_BYTES_MAX:
            raise PromiseBroken(f"{partial_bytes} bytes are held of an unfinished frame", stream)
        for frame, seed in zip(frames, seeds, strict=False):
            self._read(frame, seed)
        return len(frames)

    def _read(self, frame: Frame, seed: Seed) -> None:
        try:
            if seed.command.is_response:
                _read_response(frame, seed)
            else:
                self._request(frame)
        except (RemoteProtocolError, msgspec.ValidationError):
            pass
        except Exception as error:
            data = b"".join(map(bytes, frame[1:]))
            raise PromiseBroken(
                f"{error!r} for a frame of type {frame[0]}, code {seed.request_code}", data
            ) from error

    def _request(self, frame: Frame) -> None:
        channel = Channel()
        self._registry.handle(channel, [frame])
        if channel.written:
            for _ in FrameReader().feed(b"".join(channel.written)):
                pass


Outcome = tuple[list["Frame"], bool, int]


def read(stream: bytes, cuts: list[int]) -> Outcome:
    """Frames, whether an error came after them, and the bytes left of an unfinished one."""
    reader = FrameReader()
    frames: list[Frame] = []
    view = memoryview(stream)
    try:
        for start, end in itertools.pairwise([0, *cuts, len(stream)]):
            frames += reader.feed(view[start:end])
    except RemoteProtocolError:
        return frames, True, 0
    return frames, False, reader.partial_bytes


def _same(cut: Outcome, whole: Outcome) -> bool:
    """Frames that came in one piece with an error go with it; else all must be equal."""
    if whole[1]:
        return cut[1] and cut[0][: len(whole[0])] == whole[0]
    return cut == whole


# Nothing is put into it.
_QUEUE = StoreQueue("T", 0, 0, ConsumeQueue(Path("unused"), UNIT_BYTES, Files()))


def _serve(request: Request) -> Reply | None:
    code = request.command.code
    header_type = REQUEST_HEADERS.get(code)
    header = None if header_type is None else request.header(header_type)
    if isinstance(header, RegisterBrokerHeader) and header.compressed:
        RegisterBrokerBody.decode_compressed(request.body, has_mappings=True)
    elif code in REQUEST_BODIES:
        REQUEST_BODIES[code].decode(request.body)
    elif code == RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC:
        decode_detail(request.body)
    elif code == RequestCode.SEND_BATCH_MESSAGE:
        _read_batch(request.body)
    return Reply(header, remark=request.command.remark)


def _read_batch(body: Buffer) -> None:
    with contextlib.suppress(CorruptRecord):
        UniformBatch.of(body, 0, _QUEUE)
        BatchRecords(body, 0, _QUEUE)


def _read_response(frame: Frame, seed: Seed) -> None:
    serialize_type, header, body = frame
    command = decode_header(serialize_type, header)
    if (body_type := RESPONSE_BODIES.get(seed.request_code)) is not None:
        _read_json(body_type, body)
    elif seed.request_code in RECORD_RESPONSES:
        _read_records(body)
    if (header_type := RESPONSE_HEADERS.get(seed.request_code)) is not None:
        command.header(header_type)


def _read_json(body_type: Any, body: Buffer) -> None:
    with contextlib.suppress(MalformedJson):
        body_type.decode(body)


def _read_records(body: Buffer) -> None:
    with contextlib.suppress(CorruptRecord, CodecMissing):
        for message in decode_records(body):
            _ = (message.properties, message.keys, message.message_id, message.body)


def _unexpected(request: Request, error: Exception) -> None:
    raise error
