"""Names of brokers belong to the users that registered them first, across restarts.

Otherwise any user that may register brokers could take over the name of another's, and its routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace_nameserver.kv_config import KVConfig
    from headrace_protocol.serving import Request

_NAMES: Final = "BROKER_USERS"


class BrokerNames:
    """Users by the brokers' names that are theirs. table: keeps them in brokerNames.json."""

    def __init__(self, table: KVConfig) -> None:
        self._table = table

    async def claim(self, name: str, request: Request) -> None:
        """Make a name that nobody has the user's. A Super user takes over that of another.

        Raises RequestError if it belongs to another user.
        """
        subject = request.subject
        if subject is None or subject.user is None or not subject.is_super:
            self.check(name, request)
        user = subject and subject.user
        if user is not None and self._table.get(_NAMES, name) != user:
            await self._table.put(_NAMES, name, user)
            self.check(name, request)

    def check(self, name: str, request: Request) -> None:
        """Raise RequestError if a name belongs to another user."""
        owner, subject = self._table.get(_NAMES, name), request.subject
        if owner is not None and owner != (subject and subject.user):
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker name {name} belongs to User:{owner}, who registered it first: to free "
                f"it once that broker is down, run `headrace broker forget {name}`, or register it "
                "as a Super user",
            )

    async def free(self, name: str) -> bool:
        """Let the next user have a name; False if nobody has it."""
        if self._table.get(_NAMES, name) is None:
            return False
        await self._table.delete(_NAMES, name)
        return True
