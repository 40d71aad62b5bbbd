"""A tier without its broker: what its manifest or its folder says.

The two layouts are those of docs/tier-format.md and docs/store-format.md "Tier".
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec

from headrace.spark.chains import Item
from headrace.spark.errors import OptionError, TierGone, TierUnreachable, TopicNotFound
from headrace.spark.tier.places import Place, local_folder, open_place
from headrace.spark.tier.reader import UNIT_BYTES, TierReader
from headrace.spark.tier.spans import TierRange
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.system_topics import user_topics
from headrace_protocol.tier_bodies import LogSpan, UnitSpan
from headrace_protocol.tier_rows import FORMAT, Manifest, ObjectRow, Reference, log_span, unit_span

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace.spark.chains import Items, Queues
    from headrace.spark.cluster import Span, Topics
    from headrace.spark.tier.places import Store, TierAccess
    from headrace_protocol.tier_rows import Part

T = TypeVar("T")

_NAME: Final = "manifest.json"
_LONG_MAX: Final = 2**63 - 1
_LOADS_MAX: Final = 3
_SEGMENT: Final = re.compile(r"[0-9a-f]{8}([0-9]{20})")


class StoredTier:
    """A broker's queues as its tier has them, with the questions that a plan asks of a cluster.

    ranges: by queue, all of its messages in the tier.
    """

    def __init__(self, name: str, ranges: dict[MessageQueue, TierRange]) -> None:
        """name: of the tier, for messages."""
        self.ranges = ranges
        self._name = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def queues(self, topics: Topics) -> Queues:
        """As ``Cluster.queues``, with no addresses. Raises TopicNotFound."""
        there = {queue.topic for queue in self.ranges}
        matching = {topic for topic in user_topics(there, set()) if topics.match(topic)}
        names = matching | (there & set(topics.names))
        missing = sorted(set(topics.names) - names)
        if missing or not names:
            raise TopicNotFound(
                f"{self._name} has no messages of {', '.join(missing) or topics}: it has those of "
                f"{', '.join(sorted(there)) or 'no topic'}"
            )
        return {queue: "" for queue in sorted(self.ranges) if queue.topic in names}

    def min_offsets(self, queues: Queues) -> dict[MessageQueue, int]:
        """As ``Cluster.min_offsets``."""
        return {queue: self.ranges[queue].units[0].first for queue in queues}

    def max_offsets(self, queues: Queues) -> dict[MessageQueue, int]:
        """One past the last message in the tier."""
        return {queue: self.ranges[queue].units[-1].end for queue in queues}

    def offsets_at(self, queues: Queues, timestamp_ms: int) -> dict[MessageQueue, int]:
        """As ``Cluster.offsets_at``."""
        return {queue: _first_at(self.ranges[queue], timestamp_ms) for queue in queues}

    def parts(self, ranges: Mapping[MessageQueue, Span], _queues: Queues) -> Items:
        """As ``Cluster.parts``."""
        return {queue: [Item(queue, "", 0, *each)] for queue, each in ranges.items()}

    def tier_range(self, part: Item, _access: TierAccess) -> TierRange:
        """As ``Cluster.tier_range``."""
        return self.ranges[part.place]


def _first_at(tier: TierRange, timestamp_ms: int) -> int:
    spans = [span for span in tier.units if span.end_ms >= timestamp_ms]
    reader = TierReader(open_place(tier.place), tier)
    for span in spans:
        if span.begin_ms >= timestamp_ms:
            return span.first
        at = bisect_left(range(span.first, span.end), timestamp_ms, key=reader.store_time)
        if at < span.count:
            return span.first + at
    return tier.units[-1].end


def open_tier(access: TierAccess) -> StoredTier:
    """The tier that an option names. Raises OptionError, TierGone, TierUnreachable."""
    manifest = access.manifest
    assert manifest is not None
    if manifest.endswith(f"/{_NAME}"):
        place = Place(manifest.removesuffix(f"/{_NAME}"), config=access.config)
        ranges = _objects(access, place)
    else:
        folder = local_folder(manifest)
        if folder is None or not folder.is_dir():
            raise OptionError(
                "manifest",
                manifest,
                "is neither a manifest.json nor a folder of this machine with a tier of Apache's "
                "layout (tieredStoreFilePath)",
            )
        ranges = _files(access, Place(manifest, config=access.config), folder)
    return StoredTier(manifest, {queue: tier for queue, tier in ranges.items() if tier.units})


# -- headrace's layout -----------------------------------------------------------------------------


def _objects(access: TierAccess, place: Place) -> dict[MessageQueue, TierRange]:
    store = open_place(place)
    for attempt in range(_LOADS_MAX):
        try:
            broker, rows = _rows(store)
            break
        except TierGone:
            # A catalog was replaced after the manifest was read.
            if attempt + 1 == _LOADS_MAX:
                raise
    pieces: defaultdict[MessageQueue, list[tuple[str, Part]]] = defaultdict(list)
    for row in rows:
        for topic, parts in row.parts.items():
            for part in parts:
                if part.count:
                    pieces[MessageQueue(topic, broker, part.queue_id)].append((row.name, part))
    found = {}
    for queue, some in pieces.items():
        some.sort(key=lambda piece: piece[1].first)
        units = tuple(unit_span(name, part) for name, part in some)
        log = tuple(log_span(name, part) for name, part in some)
        found[queue] = TierRange(access, place, units, log)
    return found


def _rows(store: Store) -> tuple[str, list[ObjectRow]]:
    """The broker of a manifest, and all rows that it names. Raises TierGone."""
    manifest = _decoded(store.read_all(_NAME), Manifest, _NAME)
    if manifest.format != FORMAT:
        reason = f"has format {manifest.format}; this version reads format {FORMAT}"
        raise TierUnreachable(_NAME, reason)
    rows: list[ObjectRow] = []
    for named in manifest.catalogs:
        rows += _decoded(_named(store, named), list[ObjectRow], named.name)
    rows += [_decoded(_named(store, named), ObjectRow, named.name) for named in manifest.tail]
    return manifest.broker, rows


def _named(store: Store, named: Reference) -> bytes | memoryview:
    (data,) = store.read(named.name, [(named.start, named.stop)])
    if zlib.crc32(data) != named.crc:
        raise TierGone(named.name, "its CRC is not that of the manifest")
    return data


def _decoded(data: Any, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TierGone(path, f"is not readable: {error}") from error


# -- Apache's layout -------------------------------------------------------------------------------


def _files(access: TierAccess, place: Place, folder: Path) -> dict[MessageQueue, TierRange]:
    """The queues in a tier's folder, or in that of one of its clusters or brokers."""
    found: dict[MessageQueue, TierRange] = {}
    for units_folder in sorted(folder.glob("**/CONSUME_QUEUE")):
        queue_folder = units_folder.parent
        topic_folder = queue_folder.parent
        if not queue_folder.name.isdigit():
            continue
        broker, queue_id = topic_folder.parent.name, int(queue_folder.name)
        queue = MessageQueue(topic_folder.name, broker, queue_id)
        if queue in found:
            raise OptionError(
                "manifest", str(folder), f"has two brokers {broker}: name the folder of a cluster"
            )
        log = tuple(
            LogSpan(path, base, size, 0)
            for base, size, path in _segments(folder, queue_folder / "COMMIT_LOG")
        )
        units = tuple(
            UnitSpan(path, base // UNIT_BYTES, size // UNIT_BYTES, 0, -1, 0, _LONG_MAX)
            for base, size, path in _segments(folder, units_folder)
            if size >= UNIT_BYTES
        )
        if log and units:
            found[queue] = _kept(TierRange(access, place, units, log))
    return found


def _segments(root: Path, folder: Path) -> list[tuple[int, int, str]]:
    """Base, size and path of the files of a folder that are not empty, in order."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _SEGMENT.fullmatch(path.name)
        if match and (size := path.stat().st_size):
            found.append((int(match[1]), size, str(path.relative_to(root))))
    return sorted(found)


def _kept(tier: TierRange) -> TierRange:
    """Without the units whose records have expired."""
    first = TierReader(open_place(tier.place), tier).first_kept()
    units = tuple(
        msgspec.structs.replace(
            span,
            first=span.first + skipped,
            count=span.count - skipped,
            position=span.position + skipped * UNIT_BYTES,
        )
        for span in tier.units
        for skipped in [max(first - span.first, 0)]
        if skipped < span.count
    )
    return TierRange(tier.access, tier.place, units, tier.log)
