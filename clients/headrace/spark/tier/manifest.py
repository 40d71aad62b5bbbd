"""A tier without its broker: what its manifest or its folder says.

The two layouts are those of docs/tier-format.md and docs/store-format.md "Tier".
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, Self

import msgspec

from headrace.spark.chains import Item
from headrace.spark.errors import OptionError, TierGone, TopicNotFound
from headrace.spark.tier.locations import expect, open_location
from headrace.spark.tier.spans import TierRange
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.system_topics import user_topics
from headrace_protocol.tier.location import Location
from headrace_protocol.tier.paths import FileKind, segment_name, sizes_by_folder
from headrace_protocol.tier.rows import (
    MANIFEST,
    UNIT_BYTES,
    ObjectRow,
    decode_manifest,
    log_span,
    read_named,
    unit_span,
)
from headrace_protocol.tier_bodies import LogSpan, UnitSpan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace.spark.chains import Items, Queues
    from headrace.spark.cluster import Span, Topics
    from headrace.spark.tier.locations import TaskDriver, TierAccess
    from headrace_protocol.tier.rows import Part

_LONG_MAX: Final = 2**63 - 1
_LOADS_MAX: Final = 3


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
        return {
            queue: expect(self.ranges[queue].open().offset_by_time(timestamp_ms))
            for queue in queues
        }

    def parts(self, ranges: Mapping[MessageQueue, Span], _queues: Queues) -> Items:
        """As ``Cluster.parts``."""
        return {queue: [Item(queue, "", 0, *each)] for queue, each in ranges.items()}

    def tier_range(self, part: Item, _access: TierAccess) -> TierRange:
        """As ``Cluster.tier_range``."""
        return self.ranges[part.physical]


def open_tier(access: TierAccess) -> StoredTier:
    """The tier that an option names. Raises OptionError, TierGone, TierUnreachable."""
    manifest = access.manifest
    assert manifest is not None
    if manifest.endswith(f"/{MANIFEST}"):
        location = Location(manifest.removesuffix(f"/{MANIFEST}"), config=access.config)
        ranges = _objects(access, location)
    else:
        location = Location(manifest, config=access.config)
        folder = location.folder
        if folder is None or not folder.is_dir():
            raise OptionError(
                "manifest",
                manifest,
                "is neither a manifest.json nor a folder of this machine with a tier of Apache's "
                "layout (tieredStoreFilePath)",
            )
        ranges = _files(access, location, folder)
    return StoredTier(manifest, {queue: tier for queue, tier in ranges.items() if tier.units})


# -- headrace's layout -----------------------------------------------------------------------------


def _objects(access: TierAccess, location: Location) -> dict[MessageQueue, TierRange]:
    driver = open_location(location)
    for attempt in range(_LOADS_MAX):
        try:
            broker, rows = _rows(driver)
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
        found[queue] = TierRange(access, location, units, log)
    return found


def _rows(driver: TaskDriver) -> tuple[str, list[ObjectRow]]:
    """The broker of a manifest, and all rows that it names. Raises TierGone."""
    manifest = expect(decode_manifest(expect(driver.read_all(MANIFEST)), MANIFEST))
    return manifest.broker, expect(read_named(driver, "", manifest)).rows()


# -- Apache's layout -------------------------------------------------------------------------------


def _files(access: TierAccess, location: Location, folder: Path) -> dict[MessageQueue, TierRange]:
    """The queues in a tier's folder, or in that of one of its clusters or brokers."""
    found: dict[MessageQueue, TierRange] = {}
    stored = sizes_by_folder(expect(open_location(location).entries("")))
    for units_folder, sizes in sorted(stored.items()):
        parts = (folder.absolute() / units_folder).parts[-4:]
        if len(parts) < 4 or parts[3] != FileKind.CONSUME_QUEUE.name or not parts[2].isdigit():
            continue
        broker, topic, queue_id, kind = parts
        queue = MessageQueue(topic, broker, int(queue_id))
        if queue in found:
            raise OptionError(
                "manifest", str(folder), f"has two brokers {broker}: name the folder of a cluster"
            )
        log_folder = f"{units_folder.removesuffix(kind)}{FileKind.COMMIT_LOG.name}"
        log = tuple(
            LogSpan(f"{log_folder}/{segment_name(base)}", base, size, 0)
            for base, size in sorted(stored.get(log_folder, {}).items())
            if size
        )
        units = tuple(
            UnitSpan(
                f"{units_folder}/{segment_name(base)}",
                base // UNIT_BYTES,
                size // UNIT_BYTES,
                0,
                -1,
                0,
                _LONG_MAX,
            )
            for base, size in sorted(sizes.items())
            if size >= UNIT_BYTES
        )
        if log and units:
            found[queue] = _kept(TierRange(access, location, units, log))
    return found


def _kept(tier: TierRange) -> TierRange:
    """Without the units whose records have expired."""
    first = expect(tier.open().head(tier.log[0].base)).queue_offset
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
    return TierRange(tier.access, tier.location, units, tier.log)
