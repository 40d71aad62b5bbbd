"""Proofs of users by which connections are logged in; each request asks whether they still hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_protocol.rights.users import User, Verifier

# One remark for an unknown or disabled user, a wrong signature and a missing name: whoever tries
# names out learns nothing.
REJECTED: Final = "check signature failed."
EXPIRED: Final = "log-in expired with its token: log in with a new one"


class Proof(Protocol):
    """A proof of a user."""

    @property
    def lifetime_s(self) -> float | None:
        """Seconds until it ends; None if it has no end."""

    def refusal(self, user: User) -> str:
        """The reason why the proof no longer holds; empty while it does."""


class PasswordProof(NamedTuple):
    """A log-in with the password that a verifier is of: another password ends it."""

    verifier: Verifier

    @property
    def lifetime_s(self) -> None:
        """See ``Proof``."""
        return

    def refusal(self, user: User) -> str:
        """See ``Proof``."""
        return "" if self.verifier == user.verifier else REJECTED


class TokenProof(NamedTuple):
    """A log-in with a token: it ends with the token.

    expires_s: the token's end by the clock of the day, ``wall_s``. ends_s: the same by a clock that
    never jumps, ``now_s``. Whichever comes first counts, so a clock that is put back extends none.
    """

    expires_s: float
    ends_s: float
    wall_s: Callable[[], float]
    now_s: Callable[[], float]

    @property
    def lifetime_s(self) -> float:
        """See ``Proof``; 0 or less after the end."""
        return min(self.expires_s - self.wall_s(), self.ends_s - self.now_s())

    def refusal(self, _user: User) -> str:
        """See ``Proof``."""
        return "" if self.lifetime_s > 0 else EXPIRED
