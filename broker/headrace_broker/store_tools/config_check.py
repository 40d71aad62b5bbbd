"""Checks the small files: tables in ``config/``, positions, checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace_broker.store.files.config_file import BACKUP_SUFFIX, DAMAGED_SUFFIX, unsealed
from headrace_broker.store.integrity.checkpoint import (
    CHECKPOINT_BYTES,
    INDEX_MARK_NAME,
    Checkpoint,
)
from headrace_broker.store_tools.findings import Finding, MoveAside, RestoreBackup
from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    ConsumerFilterWrapper,
    ConsumerOffsetSerializeWrapper,
    SubscriptionGroupWrapper,
    TopicConfigSerializeWrapper,
)
from headrace_protocol.statictopic.checks import check_detail
from headrace_protocol.statictopic.mapping_file import decode_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def _check_mappings(data: bytes) -> None:
    """Raises ValueError for mappings of static topics that a broker refuses."""
    mappings, _ = decode_file(data)
    for mapping in mappings.values():
        check_detail(mapping)


# The tables that our broker reads are decoded fully; other files must only be valid JSON.
_PARSERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "topics.json": TopicConfigSerializeWrapper.decode,
    "subscriptionGroup.json": SubscriptionGroupWrapper.decode,
    "consumerOffset.json": ConsumerOffsetSerializeWrapper.decode,
    "consumerFilter.json": ConsumerFilterWrapper.decode,
    "topicQueueMapping.json": _check_mappings,
    "staticTopic.json": msgspec.json.Decoder(dict[str, str]).decode,
}
USERS_NAME: Final = "users.json"
# They are no tables of text, or have a check of their own.
_NOT_TEXT: Final = frozenset(("timercheck", USERS_NAME))


def config_findings(folder: Path) -> Iterator[Finding]:
    """Files that cannot be read; those with an intact backup can be restored."""
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        # Not read by any broker; a crash during a save leaves a .tmp.
        if path.name in _NOT_TEXT or path.suffix in {".tmp", DAMAGED_SUFFIX}:
            continue
        name = path.name.removesuffix(BACKUP_SUFFIX)
        problem = text_problem(name, path.read_bytes())
        if problem:
            yield _config_finding(path, name, problem)


def users_findings(folder: Path) -> Iterator[Finding]:
    """Users and rules with which the broker does not start. There is no safe repair."""
    path = folder / USERS_NAME
    if not path.exists():
        return
    from headrace_daemon.access.errors import AccessError
    from headrace_daemon.access.users_file import read_sealed, super_users

    try:
        read_sealed(path)
    except AccessError as error:
        problem = str(error).removeprefix(f"{path}: ")
        names = ", ".join(super_users(path)) or "none is readable"
        yield Finding(path, f"{problem}. Ask a Super user of the broker for a copy: {names}")


def text_problem(name: str, data: bytes) -> str | None:
    """The reason why a config file cannot be read; None if it is fine."""
    try:
        _PARSERS.get(name, fastjson.loads)(unsealed(data))
    except ValueError as error:
        return str(error)
    return None


def _config_finding(path: Path, name: str, problem: str) -> Finding:
    if path.name != name:
        return Finding(path, f"{problem}; this is only a backup", fix=MoveAside(path))
    backup = path.with_name(name + BACKUP_SUFFIX)
    if not backup.exists():
        fix = MoveAside(path) if name == INDEX_MARK_NAME else None
        return Finding(path, f"{problem}; there is no backup", fix=fix)
    data = backup.read_bytes()
    if text_problem(name, data):
        return Finding(path, f"{problem}; its backup is damaged too")
    return Finding(
        path, f"{problem}; its backup is intact", fix=RestoreBackup(path, unsealed(data))
    )


def checkpoint_findings(root: Path, newest: tuple[int, int] | None) -> Iterator[Finding]:
    """A checkpoint that is truncated, or ahead of the log.

    newest: physical offset and store time of the last record, if any.
    """
    path = root / "checkpoint"
    if not path.exists():
        return
    if path.stat().st_size != CHECKPOINT_BYTES:
        yield Finding(path, f"has {path.stat().st_size} bytes, not 4096", fix=MoveAside(path))
        return
    problem = _checkpoint_problem(Checkpoint.load(path), newest or (-1, 0))
    if not problem and any(path.read_bytes()[len(Checkpoint._fields) * 8 :]):
        problem = "bytes other than zeros follow its values"
    if problem:
        yield Finding(path, problem, fix=MoveAside(path))


def _checkpoint_problem(checkpoint: Checkpoint, newest: tuple[int, int]) -> str | None:
    if min(checkpoint) < 0:
        return "a value is negative"
    physical_offset, time_ms = newest
    times = checkpoint[:3]
    if max(times) > time_ms:
        return f"has the time {max(times)} ms, but the newest record in the log is of {time_ms} ms"
    if checkpoint.logics_physical_offset > max(physical_offset, 0):
        return (
            f"covers the unit of the record at {checkpoint.logics_physical_offset}, but the log's"
            f" last record is at {physical_offset}"
        )
    return None
