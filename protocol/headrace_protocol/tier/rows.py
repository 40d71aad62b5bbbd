"""Manifest, catalogs and directories of a tier in an object store, as JSON.

Source: docs/tier-format.md.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from headrace_protocol.tier.driver import Failure, FailureKind, expect, returns_failure
from headrace_protocol.tier_bodies import LogSpan, UnitSpan

if TYPE_CHECKING:
    from headrace_protocol.tier.driver import Buffer, Readable

T = TypeVar("T")

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
UNIT_BYTES: Final = 20
TIME_BYTES: Final = 8
# The level of an object that is not merged any further.
FINAL: Final = 99


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Records of a queue with consecutive queue offsets, in one object.

    number: in the object. first, count: queue offsets. log_base, log_bytes: range in the queue's
    log. begin_ms, end_ms: lowest and highest store time. position: in the object.

    Without records (``count`` is 0) it only says where its queue ends.
    """

    number: int
    queue_id: int
    first: int
    count: int
    log_base: int
    log_bytes: int
    begin_ms: int
    end_ms: int
    position: int

    @property
    def end(self) -> int:
        """One past its last queue offset."""
        return self.first + self.count

    @property
    def log_end(self) -> int:
        """One past its last byte in the queue's log."""
        return self.log_base + self.log_bytes

    @property
    def times_at(self) -> int:
        """Position of the store times, behind the units."""
        return self.position + UNIT_BYTES * self.count

    @property
    def records_at(self) -> int:
        """Position of the records, behind the store times."""
        return self.times_at + TIME_BYTES * self.count

    @property
    def stop(self) -> int:
        """One past its last byte in the object."""
        return self.records_at + self.log_bytes


class ObjectRow(msgspec.Struct, frozen=True, rename="camel"):
    """An object, and by topic the parts in it that count.

    level: how often its records were merged. run: name of the first object that was made with it;
    of an upload its own. keys_at, key_count: its key items.
    """

    name: str
    level: int
    run: str
    keys_at: int
    key_count: int
    parts: dict[str, list[Part]]

    @property
    def part_count(self) -> int:
        """Number of parts."""
        return sum(map(len, self.parts.values()))


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an object that hold rows. crc: CRC-32 of these bytes."""

    name: str
    start: int
    stop: int
    crc: int


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """The objects that count. The tier's only object that is replaced.

    epoch, writer: who may replace it. generation: number of the replacement in the epoch. number:
    of the last object that the epoch has named before. catalogs: lists of rows. tail: directories
    of objects uploaded since.
    """

    format: int
    cluster: str
    broker: str
    epoch: int
    writer: str
    generation: int
    number: int
    catalogs: list[Reference]
    tail: list[Reference]


def unit_span(path: str, part: Part) -> UnitSpan:
    """The span of a part's units. path: of its object."""
    return UnitSpan(
        path,
        part.first,
        part.count,
        part.position,
        part.log_base,
        part.begin_ms,
        part.end_ms,
    )


def log_span(path: str, part: Part) -> LogSpan:
    """The span of a part's records. path: of its object."""
    return LogSpan(path, part.log_base, part.log_bytes, part.records_at)


# -- bytes -----------------------------------------------------------------------------------------


def encode(value: object) -> bytes:
    """As JSON."""
    return msgspec.json.encode(value)


def reference(name: str, start: int, data: Buffer) -> Reference:
    """Names bytes of an object."""
    return Reference(name, start, start + len(data), zlib.crc32(data))


def decode(data: Buffer, kind: type[T], path: str, named: Reference | None = None) -> T | Failure:
    """Rows that were read. Fails with DAMAGED."""
    if named is not None and zlib.crc32(data) != named.crc:
        return Failure(FailureKind.DAMAGED, path, "its CRC is not that of the manifest")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Failure(FailureKind.DAMAGED, path, f"not readable: {error}")


def decode_manifest(data: Buffer, path: str) -> Manifest | Failure:
    """A manifest of this version's format. Fails with DAMAGED."""
    manifest = decode(data, Manifest, path)
    if isinstance(manifest, Failure) or manifest.format == FORMAT:
        return manifest
    reason = f"has format {manifest.format}, this version reads {FORMAT}: upgrade headrace"
    return Failure(FailureKind.DAMAGED, path, reason)


class Named(NamedTuple):
    """The rows that a manifest names. tail: those of its tail."""

    catalogs: list[tuple[Reference, list[ObjectRow]]]
    tail: list[ObjectRow]

    def rows(self) -> list[ObjectRow]:
        """All rows, oldest objects first."""
        return [*(row for _, rows in self.catalogs for row in rows), *self.tail]


@returns_failure
def read_named(driver: Readable, folder: str, manifest: Manifest) -> Named:
    """Read the rows that a manifest names.

    folder: its own, with a ``/``; "" for the location itself.

    Fails as a read, and with DAMAGED.
    """

    def read(named: Reference, kind: type[T]) -> T:
        path = folder + named.name
        (data,) = expect(driver.read(path, [(named.start, named.stop)]))
        return expect(decode(data, kind, path, named))

    catalogs = [(named, read(named, list[ObjectRow])) for named in manifest.catalogs]
    return Named(catalogs, [read(named, ObjectRow) for named in manifest.tail])
