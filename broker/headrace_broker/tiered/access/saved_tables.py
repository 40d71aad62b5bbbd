"""The broker's tables in the tier, for a broker that has lost its disk.

One small object beside the queues, which Apache's broker does not look for. It belongs to the store
that wrote it first: a new and empty store of the same name must not replace what is to be restored.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.tiered.container.metadata import TopicRow  # noqa: TC001 - msgspec reads the annotations
from headrace_broker.tiered.container.paths import cluster_folder
from headrace_broker.tiered.driver.interface import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.container.tier import Home
    from headrace_broker.tiered.driver.interface import Driver, PutDriver

log = structlog.get_logger("headrace.broker")

FORMAT: Final = 1
FILES: Final = (
    "topics.json",
    "subscriptionGroup.json",
    "consumerOffset.json",
    "topicIncarnation.json",
)
_OWNER_FILE: Final = "tieredTables.json"
_ID_BYTES: Final = 8


class SavedTables(msgspec.Struct, frozen=True, rename="camel"):
    """The tables. store: id of the store that they belong to. files: their texts, by file name.

    topics: the ids of topics in index files.
    """

    format: int
    cluster: str
    broker: str
    store: str
    saved_ms: int
    files: dict[str, str]
    topics: list[TopicRow]


class Owner(msgspec.Struct, frozen=True):
    """Which tables belong to this store."""

    store: str


def tables_path(home: Home) -> str:
    """The path of a broker's tables in its tier."""
    return f"{cluster_folder(home.cluster)}/{home.broker}/tables.json"


def read_tables(driver: Driver, home: Home) -> SavedTables | Failure:
    """The tables in the tier. Fails with MISSING, UNREACHABLE, DAMAGED."""
    path = tables_path(home)
    size = driver.size(path)
    if isinstance(size, Failure):
        return size
    read = driver.read(path, [(0, size)])
    if isinstance(read, Failure):
        return read
    try:
        found = msgspec.json.decode(read[0], type=SavedTables)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Failure(FailureKind.DAMAGED, path, f"not readable: {error}")
    if found.format != FORMAT or (found.cluster, found.broker) != home:
        reason = f"has format {found.format} and belongs to {found.broker} of {found.cluster}"
        return Failure(FailureKind.DAMAGED, path, reason)
    return found


def owner_file(root: Path, files: Files | None = None) -> ConfigFile:
    """The local file that names the tables of a store."""
    return ConfigFile(root / "config" / _OWNER_FILE, files)


def parse_owner(text: bytes) -> Owner:
    """The owner in a file's text. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=Owner)
    except msgspec.MsgspecError as error:
        raise ValueError(f"names no store: {error}") from error


class TableSaver:
    """Copies the saved tables of a store into its tier, when they have changed."""

    def __init__(
        self,
        open_driver: Callable[[], PutDriver],
        home: Home,
        root: Path,
        files: Files,
        topics: Callable[[], list[TopicRow]],
    ) -> None:
        self._open_driver = open_driver
        self._home = home
        self._root = root
        self._files = files
        self._topics = topics
        self._driver: PutDriver | None = None
        self._saved: tuple[dict[str, str], list[TopicRow]] | None = None
        self._is_warned = False
        # Of the tables that this object has put; "" if the tier may have others.
        self._etag = ""

    def save(self, now_ms: int) -> None:
        """Save what the disk has now, unless the tier has it. Raises OSError, StoreFormatError."""
        config = self._root / "config"
        read = {name: ConfigFile(config / name, self._files).load() for name in FILES}
        texts = {name: text.decode() for name, text in read.items() if text is not None}
        topics = self._topics()
        if (texts, topics) == self._saved:
            return
        if self._driver is None:
            self._driver = self._open_driver()
        path, owner = tables_path(self._home), self._owner()
        if not self._etag and not self._may_replace(self._driver, path, owner):
            return
        tables = SavedTables(FORMAT, *self._home, owner.store, now_ms, texts, topics)
        put = self._driver.put(path, msgspec.json.encode(tables), self._etag)
        if isinstance(put, Failure):
            self._etag = ""  # looked for again, since the put may have taken place
            raise OSError(str(put))
        self._saved, self._etag = (texts, topics), put

    def _may_replace(self, driver: PutDriver, path: str, owner: Owner) -> bool:
        """Find what the tier has, which may be another store's. Raises OSError."""
        found = read_tables(driver, self._home)
        if isinstance(found, Failure) and found.kind is FailureKind.UNREACHABLE:
            raise OSError(str(found))
        if not isinstance(found, Failure) and found.store != owner.store:
            self._warn(path)
            return False
        etag = driver.etag(path)
        self._etag = etag if isinstance(etag, str) else ""
        return True

    def _owner(self) -> Owner:
        file = owner_file(self._root, self._files)
        owner = file.read(parse_owner)
        if owner is None:
            owner = Owner(secrets.token_hex(_ID_BYTES))
            file.save(msgspec.json.encode(owner))
        return owner

    def _warn(self, path: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "the tier has the tables of another store of this name, they are kept",
                path=path,
                remedy="if that store is lost, stop this broker and run headrace tier restore on "
                "an empty store; else remove the object",
            )
