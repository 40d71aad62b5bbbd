"""Users of a cluster with their rules, as a daemon knows them.

Source: org.apache.rocketmq.auth.authentication.model.User; docs/security.md "Users".
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol.rights.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Mapping


class UserKind(Enum):
    """Kind of a user. SUPER: may do everything, whatever rules say."""

    SUPER = "Super"
    NORMAL = "Normal"


class UserStatus(Enum):
    """Status of a user. DISABLE: rejected like an unknown user."""

    ENABLE = "enable"
    DISABLE = "disable"


class Verifier(NamedTuple):
    """Proof of a password without the password: that of SCRAM-SHA-256 (RFC 5802).

    salt: random bytes. iterations: those of PBKDF2. stored_key, server_key: 32 bytes each.
    """

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return "Verifier(...)"


class User(NamedTuple):
    """A user. secret: None for a user without signatures, who logs in with sessions only.

    verifier: None for a user without a password, whom a token or a certificate proves.
    """

    name: str
    kind: UserKind
    status: UserStatus
    verifier: Verifier | None
    secret: str | None = None

    @property
    def is_super(self) -> bool:
        """True for a user who may do everything."""
        return self.kind is UserKind.SUPER

    @property
    def is_enabled(self) -> bool:
        """True for a user who may log in and sign."""
        return self.status is UserStatus.ENABLE

    def __repr__(self) -> str:
        return f"User({self.name!r}, {self.kind.value}, {self.status.value})"


class Users:
    """The users of a daemon and their rules by user name.

    version: grows with each change; what was decided under another one is to be decided again.
    """

    def __init__(self) -> None:
        self._users: dict[str, User] = {}
        self._rules: dict[str, Rules] = {}
        self.version = 0

    @property
    def users(self) -> Mapping[str, User]:
        """All users by name."""
        return self._users

    def rules(self, name: str) -> Rules:
        """The rules of a user; none for one that has none."""
        return self._rules.get(name, NO_RULES)

    def put(self, user: User) -> None:
        """Add or replace a user."""
        self._users[user.name] = user
        self.version += 1

    def remove(self, name: str) -> None:
        """Remove a user with its rules, if there is one."""
        self._users.pop(name, None)
        self._rules.pop(name, None)
        self.version += 1

    def put_rules(self, name: str, rules: Rules) -> None:
        """Replace the rules of a user."""
        self._rules[name] = rules
        if rules.is_empty:
            del self._rules[name]
        self.version += 1


NO_RULES: Final = Rules()
