"""Settings of the audit log: a part of the table in ``config.py``."""

from __future__ import annotations

from pydantic import BaseModel

from headrace_broker.settings.setting import setting
from headrace_daemon.audit.settings import (
    BYTES_MAX,
    BYTES_MAX_LEAST,
    FILES_MAX_MOST,
    AuditSettings,
    OnFailure,
    audit_settings,
)


class AuditFields(BaseModel):
    """The settings, under the names that the nameserver has for them."""

    audit_log_path: str = setting(
        "",
        "File that records administration, denials, log-ins and the like, one line each; if empty,"
        ' none. See docs/security.md "Audit log".',
    )
    audit_on_failure: OnFailure = setting(
        "drop",
        "While the audit log can't be written: drop and count its lines, or refuse administrative"
        " requests.",
    )
    audit_log_bytes_max: int = setting(
        BYTES_MAX,
        "Size at which the audit log is rotated, as it is each day.",
        unit="bytes",
        ge=BYTES_MAX_LEAST,
        le=2**63 - 1,
    )
    audit_log_files_max: int = setting(
        0,
        "Maximum number of rotated audit logs; the oldest are deleted. 0 keeps all.",
        unit="files",
        ge=0,
        le=FILES_MAX_MOST,
    )

    @property
    def audit(self) -> AuditSettings | None:
        """The audit log; None without one."""
        return audit_settings(self)
