"""Key-value settings stored for clients, by namespace and key."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from headrace_daemon.saved_table import Edit, PlainFile, SavedTable
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
from headrace_protocol.errors import reason_of
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Topics whose queues are strictly ordered: topic -> "broker:queues;...".
ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"

# Limit for all names and values, since each change rewrites them and registrations return some.
CHARS_MAX = 4 * 1024 * 1024

_Key = tuple[str, str]  # namespace and key


class KVConfig(SavedTable[_Key, str]):
    """namespace -> key -> value.

    path: the file kvConfig.json; None keeps the table in memory only.
    items_max, chars_max: the most values, and characters of all names and values.

    Raises ConfigError if the file exists but cannot be read.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        items_max: int = ITEMS_MAX,
        chars_max: int = CHARS_MAX,
    ) -> None:
        self._items_max = items_max
        self._chars_max = chars_max
        self._table: dict[str, dict[str, str]] = {}
        self._file = None if path is None else PlainFile(path)
        loaded = {} if self._file is None else _read(self._file)
        super().__init__(
            path,
            {(name, key): text for name, values in loaded.items() for key, text in values.items()},
        )

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises OutOfBounds, and RequestError if it can't be saved."""
        check_text("value", value, KV_VALUE_BYTES_MAX)
        await self._edit(namespace, key, value)

    async def delete(self, namespace: str, key: str) -> None:
        """Delete a value. Errors as for ``put``."""
        await self._edit(namespace, key, None)

    async def _edit(self, namespace: str, key: str, value: str | None) -> None:
        for what, text in (("namespace", namespace), ("key", key)):
            check_text(what, text, NAME_CHARS_MAX)

        def edit(entries: Mapping[_Key, str]) -> Edit[_Key, str] | None:
            if entries.get((namespace, key)) == value:
                return None
            if value is not None:
                self._check_room({**entries, (namespace, key): value})
            return Edit((namespace, key), value)

        await self.change(edit)

    def _check_room(self, entries: Mapping[_Key, str]) -> None:
        chars = sum(map(len, chain(chain.from_iterable(entries), entries.values())))
        if len(entries) > self._items_max or chars > self._chars_max:
            raise OutOfBounds(
                f"{len(entries)} values with {chars} characters: the maximum for all namespaces is "
                f"{self._items_max} values and {self._chars_max} characters; delete some first"
            )

    def _write(self, entries: Mapping[_Key, str]) -> None:
        table: dict[str, dict[str, str]] = {}
        for key, value in entries.items():
            _put_in(table, key, value)
        assert self._file is not None
        kept = KVConfigSerializeWrapper(config_table=table)
        self._file.save(fastjson.dumps(kept, pretty=True))

    def _put(self, key: _Key, value: str | None) -> None:
        _put_in(self._table, key, value)

    def get(self, namespace: str, key: str) -> str | None:
        """A value; None if missing."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All keys and values of a namespace; None if it is empty."""
        return self._table.get(namespace) or None


def _put_in(table: dict[str, dict[str, str]], key: _Key, value: str | None) -> None:
    """Set a value of a table, or with None delete it; no namespace is empty."""
    namespace, name = key
    values = table.setdefault(namespace, {})
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value
    if not values:
        del table[namespace]


def _read(file: PlainFile) -> dict[str, dict[str, str]]:
    try:
        kept = file.read(KVConfigSerializeWrapper.decode)
    except (OSError, MalformedJson) as error:
        raise ConfigError(
            f"{file.path}: cannot read key-value settings: {reason_of(error)}; "
            "repair it or move it away"
        ) from error
    return {} if kept is None else kept.config_table
