"""What a ``Registry`` calls in a program without a loop, threads or turns."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace_protocol.channel import Channel
    from headrace_protocol.command import Command
    from headrace_protocol.errors import NotReady
    from headrace_protocol.frame import Buffer


def run_at_once(work: Iterator[None]) -> None:
    """Run work to its end, for a program without a loop of slices."""
    deque(work, maxlen=0)


def fetch_at_once(
    _channel: Channel, wait: NotReady, then: Callable[[Exception | None], None]
) -> None:
    """Fetch, then call back, for a program without threads."""
    problem: Exception | None = None
    try:
        wait.fetch()
    except Exception as error:  # noqa: BLE001 - passed to the waiting request
        problem = error
    then(problem)


def serve_at_once(_channel: Channel, serve: Callable[[], object]) -> None:
    """Serve, for a daemon whose answers need not wait for a commit."""
    serve()


def reject_answer(_channel: Channel, _command: Command, _body: Buffer) -> bool:
    """Reject answers, for a daemon that sends no requests to its clients."""
    return False
