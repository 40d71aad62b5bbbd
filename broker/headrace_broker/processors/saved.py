"""The end of a change of a table: when it is on disk, or why it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.waiting import Until

if TYPE_CHECKING:
    from collections.abc import Callable

    WhenSaved = Callable[[Callable[[Exception | None], None]], None]


async def saved(when_saved: WhenSaved) -> None:
    """Wait until a change is on disk.

    Raises RequestError if it is not: it holds until the broker stops, and the save is retried.
    """
    error: Exception | None = await Until("saves of tables", lambda run: when_saved(run.resume))
    if error is not None:
        remedy = "; free space on the disk" if isinstance(error, OSError) else ""
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"the change holds until this broker stops, but can't be saved: {error}; "
            f"the broker retries{remedy}",
        )
