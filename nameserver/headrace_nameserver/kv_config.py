"""Settings that clients keep here, by namespace and key."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from headrace_nameserver.config import ConfigError
from headrace_protocol import fastjson
from headrace_protocol.bodies import KVConfigSerializeWrapper
from headrace_protocol.bounds import (
    ITEMS_MAX,
    KV_VALUE_BYTES_MAX,
    NAME_CHARS_MAX,
    OutOfBounds,
    check_text,
)
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from pathlib import Path

# Topics whose queues are strictly ordered: topic -> "broker:queues;...".
ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"

# All names and values together: each change rewrites them, and registrations receive some.
CHARS_MAX = 4 * 1024 * 1024

_Table = dict[str, dict[str, str]]


class _Change(msgspec.Struct):
    """value: None deletes the key."""

    namespace: str
    key: str
    value: str | None
    done: Future[None]


class KVConfig:
    """namespace -> key -> value.

    path: the file kvConfig.json; None: memory only. A change becomes visible once ``save``, which
    any thread may call, has written it to disk. One save writes all waiting changes, in order.
    Raises ConfigError when the file is there but can't be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._table: _Table = {}
        self._waiting: deque[_Change] = deque()
        self._saving = threading.Lock()
        if path and path.exists():
            self._table = _read(path).config_table

    def put(self, namespace: str, key: str, value: str) -> Future[None]:
        """Set a value. Raises OutOfBounds; the future raises OSError if it can't be saved."""
        check_text("value", value, KV_VALUE_BYTES_MAX)
        return self._change(namespace, key, value)

    def delete(self, namespace: str, key: str) -> Future[None]:
        """Delete a value; as ``put``."""
        return self._change(namespace, key, None)

    def _change(self, namespace: str, key: str, value: str | None) -> Future[None]:
        for what, text in (("namespace", namespace), ("key", key)):
            check_text(what, text, NAME_CHARS_MAX)
        change = _Change(namespace, key, value, Future())
        self._waiting.append(change)
        if self._path is None:
            self.save()
        return change.done

    def save(self) -> None:
        """Write all waiting changes to disk, and set their futures."""
        with self._saving:
            changes = [self._waiting.popleft() for _ in range(len(self._waiting))]
            table, made = self._with(changes)
            try:
                if self._path and table is not self._table:
                    kept = KVConfigSerializeWrapper(config_table=table)
                    _replace_file(self._path, fastjson.dumps(kept, pretty=True))
            except Exception as error:  # noqa: BLE001 - raised again where the request is served
                for change in made:
                    change.done.set_exception(error)
                return
            self._table = table
        for change in made:
            change.done.set_result(None)

    def _with(self, changes: list[_Change]) -> tuple[_Table, list[_Change]]:
        """The table after the changes, and those of them that fit."""
        table, made = self._table, []
        for change in changes:
            try:
                table = _changed(table, change)
            except OutOfBounds as error:
                change.done.set_exception(error)
            else:
                made.append(change)
        return table, made

    def get(self, namespace: str, key: str) -> str | None:
        """A value."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All of a namespace; None when it has nothing."""
        return self._table.get(namespace) or None


def _changed(table: _Table, change: _Change) -> _Table:
    """The table after a change; the same object if nothing changes. Raises OutOfBounds."""
    namespace, key, value = change.namespace, change.key, change.value
    values = table.get(namespace, {})
    if values.get(key) == value:
        return table
    others = {other: text for other, text in values.items() if other != key}
    if value is not None:
        others[key] = value
    changed = {**table, namespace: others}
    if not others:
        del changed[namespace]
    if value is not None:
        _check_room(changed)
    return changed


def _check_room(table: _Table) -> None:
    count = sum(map(len, table.values()))
    chars = sum(
        len(namespace) + len(key) + len(value)
        for namespace, values in table.items()
        for key, value in values.items()
    )
    if count > ITEMS_MAX or chars > CHARS_MAX:
        raise OutOfBounds(
            f"{count} values of {chars} characters: {ITEMS_MAX} and {CHARS_MAX} are the most for "
            "all namespaces together; delete some first"
        )


def _read(path: Path) -> KVConfigSerializeWrapper:
    try:
        return KVConfigSerializeWrapper.decode(path.read_bytes())
    except (OSError, MalformedJson) as error:
        raise ConfigError(
            f"{path}: can't read key-value settings: {error}; mend it or move it away"
        ) from error


def _replace_file(path: Path, data: bytes) -> None:
    """Whoever reads the file, even after a crash, sees all of the old text or all of the new."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    # Never write through a file or link that somebody else placed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
