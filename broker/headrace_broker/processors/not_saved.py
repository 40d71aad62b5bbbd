"""The reply to a change of a table that could not be saved."""

from __future__ import annotations

from headrace_protocol.codes import ResponseCode
from headrace_protocol.serving import Reply


def not_saved(error: Exception) -> Reply:
    """The change holds until the broker stops; saving the table is retried."""
    remedy = "; free space on the disk" if isinstance(error, OSError) else ""
    return Reply(
        code=ResponseCode.SYSTEM_ERROR,
        remark=f"the change holds until this broker stops, but can't be saved: {error}; "
        f"the broker retries{remedy}",
    )
