"""The seal of one file: checksums with which each block is compared at its first read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_broker.store.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK_BYTES: Final = 1 << 20
# Most bytes that the loop compares itself, in some tens of microseconds; a thread compares more.
LOOP_BYTES_MAX: Final = 256 << 10
_COMPARED, _PENDING, _DAMAGED = range(3)


class StoreDamaged(StoreError):
    """A file's bytes differ from those at the last clean stop."""

    def __init__(self, path: Path, position: int, byte_count: int) -> None:
        super().__init__(
            f"{path}: damaged somewhere in the {byte_count} bytes from {position} on: stop the "
            "broker and run headrace store fsck on its directory"
        )
        self.path = path
        self.position = position
        self.byte_count = byte_count


class FileSeal:
    """A file's checksums, and for each block whether it was compared yet."""

    __slots__ = ("_states", "checksums", "used_bytes")

    def __init__(self, used_bytes: int, checksums: list[int]) -> None:
        self.used_bytes = used_bytes
        self.checksums = checksums
        self._states = bytearray((_PENDING,)) * len(checksums)

    @classmethod
    def of_written(cls, path: Path, used_bytes: int, before: FileSeal | None) -> FileSeal:
        """The seal of a file to which nothing will be appended; in any thread. Raises OSError.

        before: the file's seal so far.
        """
        kept = before.kept(used_bytes) if before else []
        written = []
        with path.open("rb", buffering=0) as file:
            file.seek(len(kept) * BLOCK_BYTES)
            while block := file.read(min(BLOCK_BYTES, used_bytes - file.tell())):
                written.append(crc32(block))
        seal = cls(used_bytes, kept + written)
        states = before._states[: len(kept)] if before else b""
        seal._states[:] = bytes(states).ljust(len(seal.checksums), bytes((_COMPARED,)))
        return seal

    def kept(self, used_bytes: int) -> list[int]:
        """The checksums that remain valid after the file has grown to ``used_bytes``."""
        is_same = used_bytes == self.used_bytes
        return self.checksums[: None if is_same else self.used_bytes // BLOCK_BYTES]

    def pending_bytes(self, start: int, end: int) -> int:
        """The number of bytes that must still be compared for a range."""
        numbers = self._numbers(start, end)
        count = self._states.count(_PENDING, numbers.start, numbers.stop)
        return min(count * BLOCK_BYTES, self.used_bytes)

    def is_pending(self, number: int) -> bool:
        """True if a block is in use and was not compared yet."""
        return number < len(self._states) and self._states[number] == _PENDING

    def compare(self, number: int, checksum: int) -> None:
        """Record whether a block matches, for ``check`` to report; in any thread."""
        is_same = checksum == self.checksums[number]
        self._states[number] = _COMPARED if is_same else _DAMAGED

    def check(self, path: Path, pread: Callable[[int, int], bytes], start: int, end: int) -> None:
        """Compare the blocks of a range that were not compared before; in any thread.

        pread: bytes of the file by position and count. Raises StoreDamaged, OSError.
        """
        for number in self._numbers(start, end):
            if self._states[number] == _COMPARED:
                continue
            at, upto = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.used_bytes)
            if self._states[number] == _PENDING:
                self.compare(number, crc32(pread(at, upto - at)))
            if self._states[number] == _DAMAGED:
                raise StoreDamaged(path, at, upto - at)

    def _numbers(self, start: int, end: int) -> range:
        last = min(end, self.used_bytes) - 1
        return range(start // BLOCK_BYTES, last // BLOCK_BYTES + 1)
