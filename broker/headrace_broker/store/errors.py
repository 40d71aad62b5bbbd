"""Errors of a store; each names the thing, the place and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.errors import PortableError

if TYPE_CHECKING:
    from pathlib import Path


class StoreError(PortableError):
    """Base class of all errors of a store."""


class StoreLocked(StoreError):
    """Another broker has the directory open."""

    def __init__(self, root: Path, holder: str) -> None:
        super().__init__(
            f"store {root} is in use by {holder}: stop it, or give this broker its own directory"
        )
        self.root = root


class StoreMissing(StoreError):
    """The directory has no store, or a new one, though there was another.

    known: who knows of it. forget: the command that gives its messages up. found: what there is.
    """

    def __init__(self, root: Path, known: str, forget: str, found: str = "is empty") -> None:
        super().__init__(
            f"store {root} {found}, but {known}. Mount the disk of the store, restore it with "
            f"`headrace tier restore`, or give its messages up with `{forget}`"
        )
        self.root = root


class StoreFormatError(StoreError):
    """A file in the directory does not fit a store with these settings."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path


class LoadInterrupted(StoreError):
    """The broker was stopped while it loaded the store; the next start loads it again."""


class StoreNotWritable(StoreError):
    """Appends are refused; reads still work.

    error_number: errno of the OSError that is the reason, if any.
    """

    def __init__(self, reason: str, path: Path, error_number: int | None = None) -> None:
        super().__init__(f"store accepts no messages: {reason} ({path})")
        self.reason = reason
        self.path = path
        self.error_number = error_number


class StoreBusy(StoreError):
    """The dispatch ring is full because a taker lags behind the log."""

    def __init__(self, taker: str) -> None:
        super().__init__(f"dispatch is behind: {taker} has not caught up with the log; send again")
        self.taker = taker


class RecordTooLarge(StoreError):
    """A part of a message exceeds its limit."""

    def __init__(self, part: str, part_bytes: int, bytes_max: int) -> None:
        super().__init__(f"{part} has {part_bytes} bytes, more than {bytes_max}")
        self.part = part
        self.part_bytes = part_bytes
        self.bytes_max = bytes_max


class BatchTooLong(StoreError):
    """A batch has too many messages."""

    def __init__(self, count_max: int) -> None:
        super().__init__(
            f"the batch has more than {count_max} messages: none was stored, send smaller batches"
        )
