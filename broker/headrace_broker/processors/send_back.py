"""CONSUMER_SEND_MSG_BACK (36), which is not served yet and therefore not answered.

Apache's Go client takes any answer for success and commits past the message, so that a refusal
would lose it. Without an answer every client keeps the message and consumes it again itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol.codes import RequestCode

if TYPE_CHECKING:
    from headrace_protocol.drivers.host_log import HostLog
    from headrace_protocol.serving import Registry, Request


class SendBackProcessor:
    """Leaves messages that a consumer failed to process with the consumer.

    log: gets a line for each request, as often as it lets a host write.
    """

    def __init__(self, log: HostLog) -> None:
        self._log = log

    def register(self, registry: Registry) -> None:
        """Take the request without an answer."""
        registry.route(RequestCode.CONSUMER_SEND_MSG_BACK, self.leave)

    def leave(self, request: Request) -> None:
        """CONSUMER_SEND_MSG_BACK: no answer."""
        self._log.warning(
            request.channel.address,
            "message not sent back",
            group=request.command.ext().get("group"),
            reason="retry topics are not served yet: the consumer keeps the message and retries",
        )
