"""Recently failed brokers, which messages without a key avoid for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Container

AVOID_S = 30.0


class BrokerFaults:
    """The brokers to avoid, and until when."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def failed(self, broker_name: str) -> None:
        """Avoid this broker from now on."""
        self._until[broker_name] = anyio.current_time() + AVOID_S

    def current(self) -> Container[str]:
        """Names of the brokers to avoid now."""
        if self._until:
            now = anyio.current_time()
            self._until = {name: until for name, until in self._until.items() if until > now}
        return self._until
