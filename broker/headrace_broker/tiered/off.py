"""The requests about tiered storage, at a broker without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError

if TYPE_CHECKING:
    from headrace_protocol.serving import Registry, Request

_CODES: Final = (
    RequestCode.TIER_STATUS,
    RequestCode.TIER_PLAN,
    RequestCode.TIER_RESUME,
    RequestCode.TIER_FORGET,
)


class NoTier:
    """Rejects the requests, and says which setting switches the tier on."""

    def register(self, registry: Registry) -> None:
        """Route the requests."""
        for code in _CODES:
            registry.route(code, self.reject)

    def reject(self, _request: Request) -> NoReturn:
        """Raise RequestError."""
        raise RequestError(
            ResponseCode.INVALID_PARAMETER,
            "this broker has no tiered storage: set messageStorePlugIn=tieredstore, see "
            "docs/tiering.md",
        )
