"""Names of the tier's files, as Apache's posix tier has them.

``<h8(cluster)>_<cluster>/<broker>/<topic>/<queueId>/<kind>/<h8(base)><base, 20 digits>``, where h8
is the start of an MD5 that spreads the names. Source: docs/store-format.md "Tier".
"""

from __future__ import annotations

import enum
import hashlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_protocol.tier.driver import Entry

# The size of each segment of a file, by its base.
Sizes = dict[int, int]

INDEX_TOPIC: Final = "rmq_sys_INDEX"
_BASE_DIGITS: Final = 20
_NAME: Final = re.compile(r"[0-9a-f]{8}([0-9]{20})")


class FileKind(enum.IntEnum):
    """The contents of a file, with Apache's number in the metadata."""

    COMMIT_LOG = 0
    CONSUME_QUEUE = 1
    INDEX = 2


class QueueName(NamedTuple):
    """A queue of a broker."""

    broker: str
    topic: str
    queue_id: int

    @property
    def path(self) -> str:
        """Its name in the metadata, and its folder below the cluster's."""
        return f"{self.broker}/{self.topic}/{self.queue_id}"


class Home(NamedTuple):
    """The owner of a tier."""

    cluster: str
    broker: str

    @property
    def cluster_folder(self) -> str:
        """The folder of the cluster."""
        return f"{h8(self.cluster)}_{self.cluster}"

    @property
    def folder(self) -> str:
        """The folder of all that the broker has."""
        return f"{self.cluster_folder}/{self.broker}"

    @property
    def index_queue(self) -> QueueName:
        """The queue under whose name index files are kept."""
        return QueueName(self.broker, INDEX_TOPIC, 0)


def h8(text: str) -> str:
    """The first 8 hexadecimal digits of a text's MD5."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8]


def segment_name(base: int) -> str:
    """The file name of a segment that begins at ``base``."""
    return f"{h8(str(base))}{base:0{_BASE_DIGITS}}"


def segment_base(name: str) -> int | None:
    """Base of the segment of a file name; None for any other name."""
    match = _NAME.fullmatch(name)
    base = int(match[1]) if match else -1
    return base if base >= 0 and segment_name(base) == name else None


def is_segment(path: str) -> bool:
    """True if a path below the cluster's folder is that of a segment."""
    folder, _, name = path.rpartition("/")
    kind = folder.rpartition("/")[2]
    return kind in FileKind.__members__ and segment_base(name) is not None


def sizes_by_folder(entries: Iterable[Entry]) -> dict[str, Sizes]:
    """The segments in a listing: by folder, the size of each by its base; other files are left."""
    found: dict[str, Sizes] = {}
    for path, size in entries:
        folder, _, name = path.rpartition("/")
        base = segment_base(name)
        if base is not None:
            found.setdefault(folder, {})[base] = size
    return found
