"""Log-ins of a client's connections, and further ones before their tokens end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from headrace.errors import HeadraceError
from headrace_protocol.rights.bearer import RENEWAL

if TYPE_CHECKING:
    from headrace.accounts import Account
    from headrace.outages import ClientOutages
    from headrace_protocol.drivers.aio import AsyncConnection
    from headrace_protocol.rights.credentials import Credentials, Token

# Between attempts: the provider may be slow, and a token that ends soon is worth another look.
_RETRY_S: Final = 10.0
_SOONEST_S: Final = 1.0


class LogIns:
    """Logs connections in as one user. Raises ConfigurationError without password or token file.

    outages: learn of log-ins that could not be repeated.
    """

    def __init__(self, account: Account, outages: ClientOutages) -> None:
        self._account = account
        self._outages = outages
        # Passwords are read once.
        self._proof = None if callable(account.token) else account.find()

    async def log_in(self, connection: AsyncConnection) -> float | None:
        """Log a connection in, or close it; seconds until its token ends, if it has one.

        Raises as ``drivers.login.log_in``, and ConfigurationError.
        """
        try:
            return await self._log_in(connection)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await connection.close()
            raise

    async def stay(self, connection: AsyncConnection, lifetime_s: float) -> None:
        """Log a connection in again and again, each time before its token ends."""
        name = f"the log-in at {connection.address}"
        pause_s = RENEWAL * lifetime_s
        while self._account.is_renewable:
            await anyio.sleep(max(_SOONEST_S, pause_s))
            if not connection.is_open:
                break
            try:
                renewed_s = await self._log_in(connection)
            except HeadraceError as error:
                self._outages.failed(name, error)
                pause_s = _RETRY_S
            else:
                self._outages.worked(name)
                if renewed_s is None:
                    break
                pause_s = RENEWAL * renewed_s
        self._outages.forget(name)

    async def _log_in(self, connection: AsyncConnection) -> float | None:
        from headrace_protocol.drivers.login import log_in

        return await log_in(connection, await self._found())

    async def _found(self) -> Credentials | Token:
        account = self._account
        if callable(account.token):
            # It may ask a provider.
            return await anyio.to_thread.run_sync(account.find, abandon_on_cancel=True)
        return account.find() if self._proof is None or account.is_renewable else self._proof
