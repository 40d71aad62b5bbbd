"""Access of tasks to the files or objects of a tier, and its failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from headrace.spark.errors import OptionError, TierGone, TierUnreachable
from headrace_protocol.tier.driver import Failure, FailureKind
from headrace_protocol.tier.folder import FolderDriver
from headrace_protocol.tier.time_limits import Limited, TimeLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_protocol.tier.driver import Buffer, Range, Readable
    from headrace_protocol.tier.location import Location

T = TypeVar("T")

# Tasks would rather wait than fail.
_PATIENCE: Final = 12
_REQUEST_S: Final = 60
_RETRIES: Final = 10
# Of all ranges of one read, and of a manifest. Readers ask for some tens of MiB, and a catalog of
# 64 MiB names a million parts.
_READ_BYTES_MAX: Final = 128 << 20
_MANIFEST_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class TierAccess:
    """The access of a read to tiers.

    manifest: the tier to read without a broker; None if brokers name theirs. config: of obstore, by
    name, such as ``access_key_id``; it may hold secrets.
    """

    manifest: str | None = None
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)


class TaskDriver(Limited):
    """A location that tasks read.

    Whoever can write to a location chooses the names and ranges that its manifest and units state.
    So only names below it are followed, and no range is read that is unreasonably large.
    """

    def read(self, path: str, ranges: Sequence[Range]) -> list[Buffer] | Failure:
        """As ``Driver.read``. Fails with DAMAGED for names and ranges that no tier has."""
        reason = _refusal(path, ranges)
        if reason:
            return Failure(FailureKind.DAMAGED, path, reason)
        return super().read(path, ranges)

    def read_all(self, path: str) -> bytes | Failure:
        """A whole file; fails as ``read``."""
        size = self.size(path)
        if isinstance(size, Failure):
            return size
        if size > _MANIFEST_BYTES_MAX:
            reason = f"has {size} bytes; at most {_MANIFEST_BYTES_MAX} are read"
            return Failure(FailureKind.DAMAGED, path, reason)
        found = self.read(path, [(0, size)])
        return found if isinstance(found, Failure) else bytes(found[0])


def _refusal(path: str, ranges: Sequence[Range]) -> str:
    if any(part in {"", ".", ".."} for part in path.split("/")):
        return "is not the name of something below the tier's location"
    if any(not 0 <= start <= end for start, end in ranges):
        return "is to be read at offsets that no file has"
    read_bytes = sum(end - start for start, end in ranges)
    if read_bytes > _READ_BYTES_MAX:
        return f"{read_bytes} bytes of it are named; at most {_READ_BYTES_MAX} are read"
    return ""


def open_location(location: Location) -> TaskDriver:
    """The location of a tier. Raises OptionError."""
    return TaskDriver(_open(location), TimeLimits(patience=_PATIENCE))


def _open(location: Location) -> Readable:
    if location.folder is not None:
        return FolderDriver(location.folder)
    try:
        from headrace_protocol.tier.objects import open_objects

        return open_objects(location, timeout_s=_REQUEST_S, retries=_RETRIES)
    except ImportError:
        reason = f"reading {location.url} needs obstore: pip install obstore"
        raise OptionError("tier", None, reason) from None
    except ValueError as error:
        raise OptionError("tier", None, str(error)) from None


def expect(found: T | Failure) -> T:
    """The result of a read. Raises TierUnreachable for an outage, else TierGone."""
    if not isinstance(found, Failure):
        return found
    if found.kind is FailureKind.UNREACHABLE:
        raise TierUnreachable(found.path, found.reason)
    raise TierGone(found.path, found.reason)
