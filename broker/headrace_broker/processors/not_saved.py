"""The answer to a change of a table that could not be brought to disk."""

from __future__ import annotations

from headrace_protocol.codes import ResponseCode
from headrace_protocol.serving import Reply


def not_saved(error: Exception) -> Reply:
    """The change holds until the broker stops; the table is saved as soon as that is possible."""
    remedy = "; make room on the disk" if isinstance(error, OSError) else ""
    return Reply(
        code=ResponseCode.SYSTEM_ERROR,
        remark=f"the change holds until this broker stops, but can't be saved: {error}; "
        f"the broker retries{remedy}",
    )
