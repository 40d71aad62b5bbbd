"""The broker's tables in the tier, for a broker that has lost its disk.

One small object beside the queues, which Apache's broker does not look for. It belongs to the store
that wrote it first: a new and empty store of the same name must not replace what is to be restored.
"""

from __future__ import annotations

import secrets
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.tiered.access.lives import LIVES_FILE
from headrace_broker.tiered.container.metadata import TopicRow  # noqa: TC001 - msgspec reads the annotations
from headrace_protocol.tier.driver import (
    Failed,
    Failure,
    FailureKind,
    expect,
    read_whole,
    returns_failure,
)
from headrace_protocol.tier.rows import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from headrace_broker.store.files.filesystem import Files
    from headrace_broker.tiered.access.lives import Lives
    from headrace_protocol.tier.driver import Driver, PutDriver
    from headrace_protocol.tier.paths import Home

log = structlog.get_logger("headrace.broker")

FORMAT: Final = 1
INCARNATIONS_FILE: Final = "topicIncarnation.json"
# In the order in which they are read, while the broker changes them. A topic that is being made or
# deleted meanwhile is static by its mark, read before topics.json, or by its mapping, read after
# it; and a life in the tier has a topic that is in the files read later.
FILES: Final = (
    LIVES_FILE,
    "staticTopic.json",
    "topics.json",
    "subscriptionGroup.json",
    "consumerOffset.json",
    "topicQueueMapping.json",
    INCARNATIONS_FILE,
)
_OWNER_FILE: Final = "tieredTables.json"
_ID_BYTES: Final = 8
_TABLES_BYTES_MAX: Final = 1 << 30


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
    """Id of the tables that belong to this store."""

    store: str


def tables_path(home: Home) -> str:
    """The path of a broker's tables in its tier."""
    return f"{home.folder}/tables.json"


@returns_failure
def read_tables(driver: Driver, home: Home) -> SavedTables:
    """The tables in the tier. Fails with MISSING, UNREACHABLE, DAMAGED."""
    path = tables_path(home)
    text = bytes(expect(read_whole(driver, path, _TABLES_BYTES_MAX)))
    found = expect(decode(text, SavedTables, path))
    if found.format != FORMAT or (found.cluster, found.broker) != home:
        reason = f"has format {found.format} and belongs to {found.broker} of {found.cluster}"
        raise Failed(Failure(FailureKind.DAMAGED, path, reason))
    return found


_ids = msgspec.json.Decoder(dict[str, str])


def ids_in(files: Mapping[str, str], name: str) -> dict[str, str]:
    """The ids of topics in a saved file; none without the file."""
    return _ids.decode(files[name]) if name in files else {}


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
        lives: Lives,
    ) -> None:
        self._open_driver = open_driver
        self._home = home
        self._root = root
        self._files = files
        self._topics = topics
        self._lives = lives
        self._lock = Lock()
        self._saved: tuple[dict[str, str], list[TopicRow]] | None = None
        # Of the tables that this object has put or found; "" if the tier may have others.
        self._etag = ""
        # The lives that the tables in the tier name; None before the first look.
        self._named: dict[str, str] | None = None
        # The tables in the tier are those of another store.
        self._is_foreign = False

    def save(self, now_ms: int) -> None:
        """Save what the disk has now, unless the tier has it. Raises OSError, StoreFormatError."""
        with self._lock:
            self._save(now_ms)

    def name_lives(self, topics: Iterable[str], now_ms: int) -> None:
        """Have the tables in the tier name the present lives of topics that are to be uploaded.

        So whoever restores them knows of each message which life it is of, and whether its topic
        is static. Raises OSError, StoreFormatError.
        """
        current = self._lives.current(topics).items()
        with self._lock:
            if self._named is None:
                self._look()
            if not self._is_foreign and current - (self._named or {}).items():
                self._save(now_ms)

    def _save(self, now_ms: int) -> None:
        texts, topics = self._texts(), self._topics()
        if (texts, topics) == self._saved:
            return
        if not self._etag:
            self._look()
        if self._is_foreign:
            return
        tables = SavedTables(FORMAT, *self._home, self._owner().store, now_ms, texts, topics)
        path, body = tables_path(self._home), msgspec.json.encode(tables)
        put = self._open_driver().put(path, body, self._etag)
        if isinstance(put, Failure):
            self._etag = ""  # looked for again, since the put may have taken place
            raise OSError(str(put))
        self._saved, self._etag = (texts, topics), put
        self._named = ids_in(texts, LIVES_FILE)

    def _texts(self) -> dict[str, str]:
        """The files' texts. Raises OSError, StoreFormatError."""
        config = self._root / "config"
        read = {name: ConfigFile(config / name, self._files).load() for name in FILES}
        texts = {name: text.decode() for name, text in read.items() if text is not None}
        ids = ids_in(texts, INCARNATIONS_FILE)
        for topic, known in self._lives.current(ids_in(texts, LIVES_FILE)).items():
            if ids.get(topic) != known:  # it would seem to be deleted
                raise OSError(f"topic {topic} is new, and its id is not on disk yet")
        return texts

    def _look(self) -> None:
        """Find the tables that the tier has, which may be another store's. Raises OSError."""
        driver, path = self._open_driver(), tables_path(self._home)
        found = read_tables(driver, self._home)
        if isinstance(found, Failure) and found.kind is FailureKind.UNREACHABLE:
            raise OSError(str(found))
        tables = None if isinstance(found, Failure) else found
        is_foreign = tables is not None and tables.store != self._owner().store
        if is_foreign and not self._is_foreign:
            log.warning(
                "the tier has the tables of another store of this name, they are kept",
                path=path,
                remedy="if that store is lost, stop this broker and run headrace tier restore on "
                "an empty store; else remove the object",
            )
        self._is_foreign = is_foreign
        self._named = ids_in(tables.files, LIVES_FILE) if tables is not None else {}
        etag = "" if is_foreign else driver.etag(path)
        self._etag = etag if isinstance(etag, str) else ""

    def _owner(self) -> Owner:
        file = owner_file(self._root, self._files)
        owner = file.read(parse_owner)
        if owner is None:
            owner = Owner(secrets.token_hex(_ID_BYTES))
            file.save(msgspec.json.encode(owner))
        return owner
