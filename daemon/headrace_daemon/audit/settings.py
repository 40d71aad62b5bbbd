"""Settings of an audit log, as both daemons have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

from headrace_daemon.folders import folder_problem

OnFailure = Literal["drop", "refuse"]

BYTES_MAX: Final = 100 * 1024 * 1024
# A file has room for the longest line, and rotations stay rare.
BYTES_MAX_LEAST: Final = 64 * 1024
FILES_MAX_MOST: Final = 999_999


class AuditSettings(NamedTuple):
    """path: the file that is written. bytes_max: its size before it is rotated.

    files_max: rotated files that are kept; 0 keeps all.
    refuses: reject administrative requests while they can't be recorded.
    """

    path: Path
    bytes_max: int = BYTES_MAX
    files_max: int = 0
    refuses: bool = False


class AuditOptions(Protocol):
    """The settings as both daemons hold them; see docs/configuration.md."""

    @property
    def audit_log_path(self) -> str: ...  # noqa: D102
    @property
    def audit_on_failure(self) -> OnFailure: ...  # noqa: D102
    @property
    def audit_log_bytes_max(self) -> int: ...  # noqa: D102
    @property
    def audit_log_files_max(self) -> int: ...  # noqa: D102


def audit_settings(options: AuditOptions) -> AuditSettings | None:
    """The audit log of a daemon; None without one."""
    if not options.audit_log_path:
        return None
    return AuditSettings(
        Path(options.audit_log_path),
        options.audit_log_bytes_max,
        options.audit_log_files_max,
        refuses=options.audit_on_failure == "refuse",
    )


def audit_problem(path: str) -> str | None:
    """The reason for which no audit log can be at ``path``; None if one can. Creates nothing."""
    if not path:
        return None
    if Path(path).is_dir():
        return "is a directory: name a file"
    if Path(path).exists() and not os.access(path, os.R_OK | os.W_OK):
        return "this user may not read and write this file"
    return folder_problem(Path(path).parent)
