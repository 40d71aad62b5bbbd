"""Settings that clients keep here, by namespace and key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace_nameserver.config import ConfigError
from headrace_protocol import fastjson
from headrace_protocol.bodies import KVConfigSerializeWrapper
from headrace_protocol.fastjson import MalformedJson

if TYPE_CHECKING:
    from pathlib import Path

# Topics whose queues are strictly ordered: topic -> "broker:queues;...".
ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"


class KVConfig:
    """namespace -> key -> value.

    path: the file kvConfig.json, rewritten at each change, which is rare; None: memory only.
    Raises ConfigError when the file is there but can't be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._table: dict[str, dict[str, str]] = {}
        if path and path.exists():
            self._table = _read(path).config_table

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises OSError when it can't be kept."""
        self._replace(namespace, {**self._table.get(namespace, {}), key: value})

    def delete(self, namespace: str, key: str) -> None:
        """Forget a value. Raises OSError when that can't be kept."""
        values = self._table.get(namespace, {})
        if key in values:
            self._replace(namespace, {k: v for k, v in values.items() if k != key})

    def get(self, namespace: str, key: str) -> str | None:
        """A value."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All of a namespace; None when it has nothing."""
        return self._table.get(namespace) or None

    def _replace(self, namespace: str, values: dict[str, str]) -> None:
        table = {**self._table, namespace: values}
        if self._path:
            kept = KVConfigSerializeWrapper(config_table=table)
            _replace_file(self._path, fastjson.dumps(kept, pretty=True))
        self._table = table


def _read(path: Path) -> KVConfigSerializeWrapper:
    try:
        return KVConfigSerializeWrapper.decode(path.read_bytes())
    except (OSError, MalformedJson) as error:
        raise ConfigError(
            f"{path}: can't read key-value settings: {error}; mend it or move it away"
        ) from error


def _replace_file(path: Path, data: bytes) -> None:
    """Whoever reads the file, even after a crash, sees all of the old text or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
