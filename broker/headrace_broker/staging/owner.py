"""The user of a query's first block, kept beside the blocks while no decision names it.

It is written before the first block, so that a killed broker never has blocks without their owner,
and on disk with the first attempt that is sealed.
Source: docs/store-format.md "staged".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.store.errors import StoreFormatError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files

NAME: Final = "owner.json"


class _Owner(msgspec.Struct):
    owner: str


def write(folder: Path, files: Files, user: str) -> None:
    """Replace the owner; not on disk yet. Raises OSError."""
    descriptor = files.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        files.write(descriptor, msgspec.json.encode(_Owner(user)), 0)
    finally:
        files.close(descriptor)


def read(folder: Path) -> str | None:
    """The owner; None if none was written. Raises OSError, StoreFormatError."""
    path = folder / NAME
    try:
        data = path.read_bytes()
        # Killed before the write: there is no block either.
        return msgspec.json.decode(data, type=_Owner).owner if data else None
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreFormatError(
            path,
            f"damaged, so it is unknown whose query it is: {error}",
            "put a good copy in its place, or remove the query's folder: its query then writes its "
            "last batch again",
        ) from error
