"""Frames that Apache RocketMQ 5.5.0 and its clients exchanged (tests/golden/README.md)."""

from __future__ import annotations

import base64
import functools
import gzip
import struct
from pathlib import Path

import msgspec

from headrace_protocol.codes import LanguageCode

GOLDEN = Path(__file__).parent.parent / "golden"


class GoldenFrame(msgspec.Struct, rename="camel", frozen=True):
    """One recorded frame; ``request_name`` names the request that a response belongs to."""

    seq: int
    label: str
    conn: int
    peer: str
    dir: str
    code: int
    response: bool
    oneway: bool
    opaque: int
    serialize: str
    language: str | int
    version: int
    flag: int
    body_length: int
    ext: dict[str, str] | None
    remark: str | None
    frame: str
    name: str | None = None
    request_name: str = ""

    @property
    def data(self) -> bytes:
        return base64.b64decode(self.frame)

    @property
    def body(self) -> bytes:
        data = self.data
        (mark,) = struct.unpack_from(">I", data, 4)
        return data[8 + (mark & 0xFFFFFF) :]


@functools.cache
def golden_frames() -> list[GoldenFrame]:
    lines = gzip.decompress((GOLDEN / "frames.jsonl.gz").read_bytes()).splitlines()
    frames = [msgspec.json.decode(line, type=GoldenFrame) for line in lines]
    names = {(f.conn, f.dir, f.opaque): f.name for f in frames if not f.response}
    return [
        msgspec.structs.replace(
            frame,
            # As a ROCKETMQ header has it: a number.
            language=LanguageCode(frame.language).name
            if isinstance(frame.language, int)
            else frame.language,
            request_name=names[frame.conn, _other(frame.dir), frame.opaque]
            if frame.response
            else frame.name,
        )
        for frame in frames
    ]


def _other(direction: str) -> str:
    return "s2c" if direction == "c2s" else "c2s"
