"""Key-value settings stored for clients, by namespace and key."""

from __future__ import annotations

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
from headrace_protocol.drivers.files import replace_file
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from pathlib import Path

# Topics whose queues are strictly ordered: topic -> "broker:queues;...".
ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"

# Limit for all names and values, since each change rewrites them and registrations return some.
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

    path: the file kvConfig.json; None keeps the table in memory only.
    items_max, chars_max: the most values, and characters of all names and values.

    A change becomes visible once ``save``, which any thread may call, has written it to disk. One
    save writes all pending changes, in order.

    Raises ConfigError if the file exists but cannot be read.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        items_max: int = ITEMS_MAX,
        chars_max: int = CHARS_MAX,
    ) -> None:
        self._path = path
        self._items_max = items_max
        self._chars_max = chars_max
        self._table: _Table = {}
        self._pending: deque[_Change] = deque()
        self._saving = threading.Lock()
        if path and path.exists():
            self._table = _read(path).config_table

    def put(self, namespace: str, key: str, value: str) -> Future[None]:
        """Set a value. Raises OutOfBounds; the future raises OSError if the save fails."""
        check_text("value", value, KV_VALUE_BYTES_MAX)
        return self._change(namespace, key, value)

    def delete(self, namespace: str, key: str) -> Future[None]:
        """Delete a value. Errors as for ``put``."""
        return self._change(namespace, key, None)

    def _change(self, namespace: str, key: str, value: str | None) -> Future[None]:
        for what, text in (("namespace", namespace), ("key", key)):
            check_text(what, text, NAME_CHARS_MAX)
        change = _Change(namespace, key, value, Future())
        self._pending.append(change)
        if self._path is None:
            self.save()
        return change.done

    def save(self) -> None:
        """Write all pending changes to disk and complete their futures."""
        with self._saving:
            changes = [self._pending.popleft() for _ in range(len(self._pending))]
            table, accepted = self._with(changes)
            try:
                if self._path and table is not self._table:
                    kept = KVConfigSerializeWrapper(config_table=table)
                    replace_file(self._path, fastjson.dumps(kept, pretty=True))
            except Exception as error:  # noqa: BLE001 - raised where the request is served
                for change in accepted:
                    change.done.set_exception(error)
                return
            self._table = table
        for change in accepted:
            change.done.set_result(None)

    def _with(self, changes: list[_Change]) -> tuple[_Table, list[_Change]]:
        """The table after the changes, and the changes that are within bounds."""
        table, accepted = self._table, []
        for change in changes:
            try:
                changed = _changed(table, change)
                if change.value is not None and changed is not table:
                    self._check_room(changed)
                table = changed
            except OutOfBounds as error:
                change.done.set_exception(error)
            else:
                accepted.append(change)
        return table, accepted

    def _check_room(self, table: _Table) -> None:
        count = sum(map(len, table.values()))
        chars = sum(
            len(namespace) + len(key) + len(value)
            for namespace, values in table.items()
            for key, value in values.items()
        )
        if count > self._items_max or chars > self._chars_max:
            raise OutOfBounds(
                f"{count} values with {chars} characters: the maximum for all namespaces is "
                f"{self._items_max} values and {self._chars_max} characters; delete some first"
            )

    def get(self, namespace: str, key: str) -> str | None:
        """A value; None if missing."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All keys and values of a namespace; None if it is empty."""
        return self._table.get(namespace) or None


def _changed(table: _Table, change: _Change) -> _Table:
    """The table after a change; the same object if it is unchanged."""
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
    return changed


def _read(path: Path) -> KVConfigSerializeWrapper:
    try:
        return KVConfigSerializeWrapper.decode(path.read_bytes())
    except (OSError, MalformedJson) as error:
        raise ConfigError(
            f"{path}: cannot read key-value settings: {error}; repair it or move it away"
        ) from error
