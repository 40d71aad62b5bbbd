"""Small files that must never be half written: ``config/*.json``.

A file ends with a line of 32 blanks and tabs: the CRC-32 of the text before it, bit by bit. JSON
readers skip this line, and other programs that write the file leave it out.
"""

from __future__ import annotations

import enum
import re
import zlib
from typing import TYPE_CHECKING, Final, TypeVar

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.filesystem import Files, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Value = TypeVar("Value")

BACKUP_SUFFIX: Final = ".bak"
DAMAGED_SUFFIX: Final = ".damaged"
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# Text that ends outside a string. Possessive, so that the matcher keeps no backtracking state.
_PIECE: Final = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_PIECE_BYTES: Final = 1 << 16
_SEAL: Final = re.compile(rb"\n([ \t]{32})\Z")
_SEAL_BYTES: Final = 33
_BIT_TO_BLANK: Final = bytes.maketrans(b"01", b" \t")


class ConfigSource(enum.Enum):
    """The origin of a loaded value."""

    FILE = enum.auto()
    BACKUP = enum.auto()
    MISSING = enum.auto()


class ConfigFile:
    """A file and its ``.bak``: whenever a crash occurs, one of the two is whole.

    After ``load`` or ``read``, ``source`` is the one that was read, and ``problem`` says what was
    wrong with the file if it was the backup. is_ours: False if another program had written it.
    """

    def __init__(self, path: Path, files: Files | None = None, *, has_backup: bool = True) -> None:
        self.path = path
        self.backup_path = path.with_name(path.name + BACKUP_SUFFIX)
        self.damaged_path = path.with_name(path.name + DAMAGED_SUFFIX)
        self.source = ConfigSource.MISSING
        self.problem = ""
        self.is_ours = True
        self._files = files or Files()
        self._has_backup = has_backup

    def beside(self, name: str) -> ConfigFile:
        """Another file in the same folder."""
        return ConfigFile(self.path.with_name(name), self._files)

    def load(self) -> bytes | None:
        """The text of the file; otherwise as ``read``."""
        return self.read(bytes)

    def read(self, parse: Callable[[bytes], Value]) -> Value | None:
        """The parsed file, or its backup if the file is missing or damaged; None without both.

        parse: raises ValueError for a text that it can't read.

        Raises StoreFormatError if a file exists but none is whole: a damaged file must not pass
        for a missing one.
        """
        problems = []
        sources = ((self.path, ConfigSource.FILE), (self.backup_path, ConfigSource.BACKUP))
        for path, source in sources if self._has_backup else sources[:1]:
            try:
                data = read_file(path)
                value = parse(unsealed(data))
            except FileNotFoundError:
                continue
            except (ValueError, RecursionError) as error:
                problems.append(f"{path.name} {error}")
            else:
                self.source = source
                self.is_ours = _find_seal(data) is not None
                self.problem = problems[0] if problems else f"{self.path.name} is missing"
                return value
        if problems:
            raise StoreFormatError(
                self.path,
                f"can't be read: {'; '.join(problems)}",
                "put a good copy in its place, or remove it and its .bak to start without it",
            )
        self.source = ConfigSource.MISSING
        return None

    def save(self, data: bytes) -> None:
        """Replace the file; it is on disk when this returns. Raises OSError.

        On a full disk it uses the store's reserve.
        """
        # A file that could not be read must not replace the backup that was read instead.
        is_damaged = self.source is ConfigSource.BACKUP
        backup_path = self.damaged_path if is_damaged else self.backup_path
        self._files.replace(self.path, sealed(data), backup_path if self._has_backup else None)
        self.source = ConfigSource.FILE


def sealed(data: bytes) -> bytes:
    """A text followed by its checksum line."""
    return data + b"\n" + _seal(data)


def unsealed(data: bytes) -> bytes:
    """The text without its checksum line. Raises ValueError if it is truncated or was changed."""
    seal = _find_seal(data)
    text = data[: seal.start()] if seal else data
    if seal and seal[1] != _seal(text):
        raise ValueError(
            "does not match its checksum, so it was changed after it was saved; "
            "an edit by hand must remove the blanks at its end"
        )
    # Half a second for 10 MB, which a checksum saves.
    if not seal and not is_whole(text):
        raise ValueError("is truncated, or no JSON object")
    return text


def _find_seal(data: bytes) -> re.Match[bytes] | None:
    return _SEAL.search(data, max(len(data) - _SEAL_BYTES, 0))


def _seal(data: bytes) -> bytes:
    return f"{zlib.crc32(data):032b}".encode().translate(_BIT_TO_BLANK)


def is_whole(data: bytes) -> bool:
    """True if a JSON object, in any dialect, is complete; no proper prefix of one is.

    No Python objects are built from it: a table of 10 MB may hold a million strings.
    """
    balance = {b"{}": 0, b"[]": 0}
    for piece in _pieces(data):
        text = _STRING.sub(b"", piece)
        if b'"' in text:
            return False
        for pair in balance:
            balance[pair] += text.count(pair[:1]) - text.count(pair[1:])
    text = data.strip()
    return text.startswith(b"{") and text.endswith(b"}") and not any(balance.values())


def _pieces(data: bytes) -> Iterator[bytes]:
    """A text in pieces, cut outside strings; an unterminated string stays in the last piece."""
    position = 0
    while position < len(data):
        match = _PIECE.match(data, position, position + _PIECE_BYTES)
        if not match or match.end() == position:  # at a string that is longer than a piece
            match = _STRING.match(data, position)
        end = match.end() if match else len(data)
        yield data[position:end]
        position = end
