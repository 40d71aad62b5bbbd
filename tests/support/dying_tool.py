"""A command that ends itself, as kill -9 does, in place of a request that changes a static topic.

``python -m tests.support.dying_tool COUNT topic remap ...`` sends COUNT such requests, and no more.
"""

import os
import signal
import sys
from typing import Any

from headrace.admin.cli import main
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection

CHANGES = {RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, RequestCode.DELETE_TOPIC_IN_BROKER}


def end_after(count: int) -> None:
    """Let this process send so many changes."""
    request, left = AsyncConnection.request, [None] * count

    async def request_or_die(
        connection: AsyncConnection, code: int, *arguments: Any, **named: Any
    ) -> Any:
        if code in CHANGES:
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left.pop()
        return await request(connection, code, *arguments, **named)

    AsyncConnection.request = request_or_die  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    end_after(int(sys.argv.pop(1)))
    main()
