"""What the broker's tables share: how they are read, and which state they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import structlog

from headrace_broker.store.config_file import ConfigSource
from headrace_broker.store.errors import StoreFormatError
from headrace_protocol.bodies import DataVersion

if TYPE_CHECKING:
    from headrace_broker.store.config_file import ConfigFile

log = structlog.get_logger("headrace.broker")

NowMs = Callable[[], int]
Table = TypeVar("Table")


def load_table(file: ConfigFile, parse: Callable[[bytes], Table]) -> Table | None:
    """What ``parse`` makes of a file; None when it does not exist.

    parse: raises ValueError for what it can't read. Raises StoreFormatError.
    """
    data = file.load()
    if data is None:
        return None
    if file.source is ConfigSource.BACKUP:
        log.warning("file damaged or missing, its backup was read", path=str(file.path))
    try:
        return parse(data)
    except ValueError as error:
        raise StoreFormatError(
            file.path, f"can't be read: {error}", "mend it, or remove it and its .bak"
        ) from error


def next_version(version: DataVersion, now_ms: int) -> DataVersion:
    """The version after a change at ``now_ms``."""
    return DataVersion(
        state_version=version.state_version, timestamp=now_ms, counter=version.counter + 1
    )
