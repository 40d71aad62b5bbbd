"""Replaces position files of earlier builds of headrace, once, at the start after an update."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigFile, sealed
from headrace_broker.store.files.filesystem import read_file
from headrace_broker.store.files.positions import FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.store.files.filesystem import Files

_HALF, _OP = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
_INDEX_MARK: Final = struct.Struct(">17sqqqI")
_INDEX_FIELDS: Final = ("fileName", "indexCount", "endTimestamp", "lastSeen")
Values = dict[str, dict[str, Any]]


def replace_old_positions(root: Path, files: Files) -> None:
    """Save the values of old files in new ones, and remove the old. Raises StoreFormatError.

    A power cut may bring back a removed file: it never replaces a new one. Stores without any new
    file may also have states of queries with an old checksum.
    """
    if not (root / FOLDER).exists():
        _replace_states(root, files)
    for name, read in _OLD.items():
        path = root / name
        old = (path, path.with_name(path.name + ".bak"))
        if not any(each.exists() for each in old):
            continue
        for owner, value in read(path).items():
            new = root / FOLDER / f"{owner}.json"
            if not new.exists():
                files.replace(new, sealed(json.dumps(value).encode()))
        for each in filter(Path.exists, old):
            files.unlink(each)
    files.sync_names()


def _replace_states(root: Path, files: Files) -> None:
    for path in root.glob("staged/*/state.json"):
        text, _, checksum = read_file(path).rstrip(b"\n").rpartition(b"\n")
        if checksum == b"%08x" % zlib.crc32(text):
            files.replace(path, sealed(text))


def _json(path: Path) -> dict[str, Any]:
    return ConfigFile(path).read(json.loads) or {}


def _second_order(path: Path) -> Values:
    try:
        return {name: _OF_MARK[name](mark) for name, mark in _json(path).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreFormatError(path, f"holds no marks: {error!r}", "remove it") from error


def _schedule(mark: dict[str, Any]) -> dict[str, Any]:
    return {"levels": mark["progress"], "logOffset": mark["logOffset"]}


def _transaction(mark: dict[str, Any]) -> dict[str, Any]:
    progress = mark["progress"]
    return {"half": progress[_HALF], "op": progress[_OP], "logOffset": mark["logOffset"]}


def _timer(mark: dict[str, Any]) -> dict[str, Any]:
    progress = mark["progress"]
    return {
        "dueMs": progress["settledMs"],
        "queueOffset": progress["settledOffset"],
        "logOffset": mark["logOffset"],
        "oldest": progress["oldest"],
        "timestamp": progress["timestamp"],
        "counter": progress["counter"],
    }


def _index_mark(path: Path) -> Values:
    data = read_file(path)
    if len(data) != _INDEX_MARK.size or zlib.crc32(data[:-4]).to_bytes(4, "big") != data[-4:]:
        return {}
    name, *numbers, _ = _INDEX_MARK.unpack(data)
    fields = (name.rstrip(b"\0").decode(), *numbers)
    return {"index": dict(zip(_INDEX_FIELDS, fields, strict=True))}


_OF_MARK: Final = {"schedule": _schedule, "transaction": _transaction, "timer": _timer}
_OLD: Final[dict[str, Callable[[Path], Values]]] = {
    "config/secondOrder.json": _second_order,
    "deletedTopics.json": lambda path: {"deletedTopics": _json(path)},
    "headrace.indexmark": _index_mark,
}
