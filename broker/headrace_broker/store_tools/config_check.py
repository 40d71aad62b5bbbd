"""The small files: tables in ``config/``, checkpoint, index mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headrace_broker.store.files.config_file import BACKUP_SUFFIX, DAMAGED_SUFFIX, unsealed
from headrace_broker.store.integrity.checkpoint import (
    CHECKPOINT_BYTES,
    INDEX_MARK_NAME,
    Checkpoint,
    IndexMark,
)
from headrace_broker.store_tools.findings import Finding, PutAway, RestoreBackup
from headrace_protocol import fastjson
from headrace_protocol.bodies import (
    ConsumerOffsetSerializeWrapper,
    SubscriptionGroupWrapper,
    TopicConfigSerializeWrapper,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Those that a broker of ours reads have a shape; of others it matters that they are whole.
_PARSERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "topics.json": TopicConfigSerializeWrapper.decode,
    "subscriptionGroup.json": SubscriptionGroupWrapper.decode,
    "consumerOffset.json": ConsumerOffsetSerializeWrapper.decode,
}
_BINARY: Final = frozenset(("timercheck",))


def config_findings(folder: Path) -> Iterator[Finding]:
    """Files that cannot be read; with a whole backup they can be written anew."""
    for path in sorted(path for path in folder.glob("*") if path.is_file()):
        # Nobody reads these: a crash in the middle of a save leaves the first.
        if path.name in _BINARY or path.suffix in {".tmp", DAMAGED_SUFFIX}:
            continue
        name = path.name.removesuffix(BACKUP_SUFFIX)
        problem = text_problem(name, path.read_bytes())
        if problem:
            yield _config_finding(path, name, problem)


def text_problem(name: str, data: bytes) -> str | None:
    """Why a config file cannot be read; None if it can."""
    try:
        _PARSERS.get(name, fastjson.loads)(unsealed(data))
    except ValueError as error:
        return str(error)
    return None


def _config_finding(path: Path, name: str, problem: str) -> Finding:
    if path.name != name:
        return Finding(path, f"{problem}; it is only a backup", fix=PutAway(path))
    backup = path.with_name(name + BACKUP_SUFFIX)
    if not backup.exists():
        return Finding(path, f"{problem}; and there is no backup")
    data = backup.read_bytes()
    if text_problem(name, data):
        return Finding(path, f"{problem}; and neither can its backup")
    return Finding(path, f"{problem}; its backup can", fix=RestoreBackup(path, unsealed(data)))


def checkpoint_findings(root: Path, newest: tuple[int, int] | None) -> Iterator[Finding]:
    """A checkpoint that is cut, or ahead of the log.

    newest: physical offset and store time of the last record, if there is any.
    """
    path = root / "checkpoint"
    if not path.exists():
        return
    if path.stat().st_size != CHECKPOINT_BYTES:
        yield Finding(path, f"has {path.stat().st_size} bytes, not 4096", fix=PutAway(path))
        return
    problem = _checkpoint_problem(Checkpoint.load(path), newest or (-1, 0))
    if not problem and any(path.read_bytes()[len(Checkpoint._fields) * 8 :]):
        problem = "other bytes than zeros follow its values"
    if problem:
        yield Finding(path, problem, fix=PutAway(path))


def _checkpoint_problem(checkpoint: Checkpoint, newest: tuple[int, int]) -> str | None:
    if min(checkpoint) < 0:
        return "a value is negative"
    place, time_ms = newest
    times = checkpoint[:3]
    if max(times) > time_ms:
        return f"says {max(times)} ms, but the newest record in the log is of {time_ms}"
    if checkpoint.logics_physical_offset > max(place, 0):
        return (
            f"says that the record at {checkpoint.logics_physical_offset} has its unit, but the"
            f" log's last is at {place}"
        )
    return None


def mark_findings(root: Path) -> Iterator[Finding]:
    """An index mark that its own checksum contradicts."""
    path = root / INDEX_MARK_NAME
    if path.exists() and IndexMark.load(path) is None:
        yield Finding(path, "its checksum does not match", fix=PutAway(path))
