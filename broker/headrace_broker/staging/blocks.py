"""Files of staged blocks, one per attempt. Source: docs/store-format.md "staged"."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from headrace_broker.store.errors import StoreError
from headrace_broker.store.log.encoded_records import EncodedRecords
from headrace_protocol.columns import SIZE_DTYPE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedIOBase
    from pathlib import Path

    from headrace_broker.store.store_queue import StoreQueue
    from headrace_protocol.columns import Buffer

_MAGIC = b"HRSB"
_START = struct.Struct(">4sI")
# Body bytes, queue id, record count, sysFlag that the topic adds, topic bytes.
_FIELDS = struct.Struct(">IIIIH")
# Requests are not larger.
_BODY_BYTES_MAX = 16 * 1024 * 1024


class CorruptStage(StoreError):
    """A staged file has a damaged or incomplete block."""

    def __init__(self, path: Path, position: int, reason: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {position}: {reason}; its batch can't be completed: "
            "put a good copy in its place"
        )
        self.path = path
        self.position = position


class StagedBlock(NamedTuple):
    """Records of one queue, laid out as in the body of BULK_SEND; checked when they were staged."""

    topic: str
    queue_id: int
    record_count: int
    sys_flag: int
    body: Buffer

    def head(self) -> bytes:
        """The bytes before the body in the file."""
        topic = self.topic.encode()
        numbers = (len(self.body), self.queue_id, self.record_count, self.sys_flag, len(topic))
        fields = _FIELDS.pack(*numbers) + topic
        return _START.pack(_MAGIC, crc32(self.body, crc32(fields))) + fields

    def without(self, count: int) -> StagedBlock:
        """The block without its first ``count`` records; it must have more than that."""
        if not count:
            return self
        sizes = np.frombuffer(self.body, SIZE_DTYPE, self.record_count)
        records_at = sizes.nbytes + int(sizes[:count].sum(dtype=np.int64))
        rest = bytearray(sizes[count:].tobytes()) + memoryview(self.body)[records_at:]
        return self._replace(record_count=self.record_count - count, body=rest)


def read_blocks(path: Path) -> Iterator[StagedBlock]:
    """The blocks of a file in order. Raises OSError, CorruptStage at the first damaged block."""
    with path.open("rb") as file:
        position = 0
        while start := file.read(_START.size):
            block = _read_block(file, start, path, position)
            yield block
            position = file.tell()


def _read_block(file: BufferedIOBase, start: bytes, path: Path, position: int) -> StagedBlock:
    fields = file.read(_FIELDS.size)
    if len(start) < _START.size or len(fields) < _FIELDS.size:
        raise CorruptStage(path, position, "it ends within a block's head")
    magic, crc = _START.unpack(start)
    if magic != _MAGIC:
        raise CorruptStage(path, position, f"{magic.hex()} does not begin a block")
    body_bytes, queue_id, record_count, sys_flag, topic_bytes = _FIELDS.unpack(fields)
    if body_bytes > _BODY_BYTES_MAX:
        raise CorruptStage(path, position, f"a body of {body_bytes} bytes is impossible")
    topic = file.read(topic_bytes)
    body = bytearray(body_bytes)
    if len(topic) < topic_bytes or file.readinto(body) < body_bytes:
        raise CorruptStage(path, position, "it ends within a block")
    if crc32(body, crc32(topic, crc32(fields))) != crc:
        raise CorruptStage(path, position, "the block's CRC does not match")
    return StagedBlock(topic.decode(), queue_id, record_count, sys_flag, body)


class StagedRecords(EncodedRecords):
    """A staged block on its way into the log; each of its records carries ``tag``.

    The tag takes the field for the offset of a transaction's half message, which no reader of an
    ordinary message uses. After a crash, the broker counts the records that have the tag.
    """

    def __init__(self, queue: StoreQueue, block: StagedBlock, tag: int) -> None:
        super().__init__(queue, block.record_count, block.body, block.sys_flag)
        self.block = block
        self._fill("prepared_transaction_offset", tag)

    def _check(self) -> None:
        """Nothing: the records were checked when they were staged, and the file has a checksum."""
