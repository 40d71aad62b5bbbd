"""Audit logs that tests write and check."""

from __future__ import annotations

import json
import resource
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace_daemon.audit.lines import Event, encode
from headrace_daemon.audit.log_file import LogFile
from headrace_daemon.audit.settings import AuditSettings
from headrace_daemon.audit.verify import Checked, check, in_order

DAY = "2026-11-27"


def event(name: str, time: str = f"{DAY}T12:00:00.000Z", **fields: Any) -> bytes:
    return encode(Event(time=time, daemon="broker/broker-a", event=name, **fields))


def log_file(path: Path, **limits: Any) -> LogFile:
    """One that makes its own events at noon."""
    return LogFile(AuditSettings(path, **limits), lambda name, detail: event(name, detail=detail))


def write(path: Path, *events: bytes, **limits: Any) -> None:
    """As a daemon that writes these events and stops."""
    file = log_file(path, **limits)
    file.open()
    file.append(deque(events))
    file.close()


def files_of(path: Path) -> list[Path]:
    """The log and its rotated files, in order."""
    return in_order(path.parent.glob(f"{path.name}*"))


def checked(path: Path, expected: str = "") -> Checked:
    return check(files_of(path), expected)


def lines_of(path: Path) -> list[Any]:
    """All whole lines, as JSON."""
    texts = [each.read_bytes().split(b"\n")[:-1] for each in files_of(path)]
    return [json.loads(line) for lines in texts for line in lines]


def names_of(path: Path) -> list[str]:
    return [line["event"] for line in lines_of(path)]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size``: writes end there, then fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
