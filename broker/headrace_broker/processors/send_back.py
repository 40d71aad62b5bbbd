"""CONSUMER_SEND_MSG_BACK (36): not supported yet, and deliberately not answered.

Apache's Go client treats any answer as success and commits past the message, so a rejection would
lose it. Without an answer, every client keeps the message and retries it itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.codes import RequestCode

if TYPE_CHECKING:
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.serving import Registry, Request


class SendBackProcessor:
    """Ignores requests to send messages back, so that consumers keep the messages.

    log: receives a warning for each request.
    """

    def __init__(self, log: HostLog) -> None:
        self._log = log

    def register(self, registry: Registry) -> None:
        """Route the request, which gets no answer."""
        registry.route(RequestCode.CONSUMER_SEND_MSG_BACK, self.ignore)

    def ignore(self, request: Request) -> None:
        """CONSUMER_SEND_MSG_BACK: no answer."""
        self._log.warning(
            request.channel.address,
            "message not sent back",
            group=request.command.ext().get("group"),
            reason="retry topics are not served yet: the consumer keeps the message and retries",
        )
