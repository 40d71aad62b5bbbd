"""The checksums of one file: what is read first after a start is compared with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zlib_ng.zlib_ng import crc32

from headrace_broker.store.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_BYTES: Final = 1 << 20
# What is compared at once, in some tens of microseconds; more is for a thread.
LOOP_BYTES_MAX: Final = 256 << 10
_COMPARED, _OPEN, _DAMAGED = range(3)


class StoreDamaged(StoreError):
    """Bytes are others than those that the last clean stop left."""

    def __init__(self, path: Path, position: int, byte_count: int) -> None:
        super().__init__(
            f"{path}: damaged somewhere in the {byte_count} bytes from {position} on: stop the "
            "broker and run headrace store fsck on its directory"
        )
        self.path = path
        self.position = position
        self.byte_count = byte_count


class FileSeal:
    """The checksums of one file, and which blocks have still to be compared."""

    __slots__ = ("_states", "checksums", "used_bytes")

    def __init__(self, used_bytes: int, checksums: list[int]) -> None:
        self.used_bytes = used_bytes
        self.checksums = checksums
        self._states = bytearray((_OPEN,)) * len(checksums)

    @classmethod
    def of_full(cls, path: Path, file_bytes: int, before: FileSeal | None) -> FileSeal:
        """Of a file that was written to its end just now; in any thread. Raises OSError.

        before: its seal so far.
        """
        kept = before.kept(file_bytes) if before else []
        written = []
        with path.open("rb", buffering=0) as file:
            file.seek(len(kept) * BLOCK_BYTES)
            while block := file.read(BLOCK_BYTES):
                written.append(crc32(block))
        seal = cls(file_bytes, kept + written)
        states = before._states[: len(kept)] if before else b""
        seal._states[:] = bytes(states).ljust(len(seal.checksums), bytes((_COMPARED,)))
        return seal

    def kept(self, used_bytes: int) -> list[int]:
        """The checksums that still hold when there are more bytes at the end."""
        is_same = used_bytes == self.used_bytes
        return self.checksums[: None if is_same else self.used_bytes // BLOCK_BYTES]

    def open_bytes(self, start: int, end: int) -> int:
        """How much there is to compare for a range."""
        numbers = self._numbers(start, end)
        count = self._states.count(_OPEN, numbers.start, numbers.stop)
        return min(count * BLOCK_BYTES, self.used_bytes)

    def is_open(self, number: int) -> bool:
        """Whether a block is in use and was not compared yet."""
        return number < len(self._states) and self._states[number] == _OPEN

    def compare(self, number: int, checksum: int) -> None:
        """Note whether a block is what it was; ``check`` tells. In any thread."""
        is_same = checksum == self.checksums[number]
        self._states[number] = _COMPARED if is_same else _DAMAGED

    def check(self, path: Path, view: memoryview, start: int, end: int) -> None:
        """Compare the blocks that hold a range and were not compared before; in any thread.

        view: the whole file. Raises StoreDamaged.
        """
        for number in self._numbers(start, end):
            if self._states[number] == _COMPARED:
                continue
            at, upto = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.used_bytes)
            if self._states[number] == _OPEN:
                self.compare(number, crc32(view[at:upto]))
            if self._states[number] == _DAMAGED:
                raise StoreDamaged(path, at, upto - at)

    def _numbers(self, start: int, end: int) -> range:
        last = min(end, self.used_bytes) - 1
        return range(start // BLOCK_BYTES, last // BLOCK_BYTES + 1)
