"""The subject of a request, as access control has found it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from headrace_protocol.rights.rules import Action, Kind

# The name of requests without one, in remarks.
ANONYMOUS: Final = "anonymous"


class Subject(NamedTuple):
    """The user who makes a request. user: None for anonymous.

    address: the IP, as rules compare it. is_super: whether everything is permitted.
    """

    user: str | None
    address: str
    is_super: bool = False

    def __str__(self) -> str:
        return f"User:{self.user or ANONYMOUS}"


class Rights(Protocol):
    """Decides what subjects may do; see ``rights.access``."""

    def may(self, subject: Subject, kind: Kind, name: str, *actions: Action) -> bool:
        """True if a subject has one of the actions on a resource."""

    def may_create(self, subject: Subject, kind: Kind, name: str) -> bool:
        """True if a topic or group may be made for a subject."""

    def require(self, subject: Subject, kind: Kind, name: str, *actions: Action) -> None:
        """Raise RequestError unless ``may``."""
