"""The file of a daemon's users and their rules: one JSON object, a line for each user, and a seal.

The seal is the SHA-256 of the digests of all lines before it, so that a save need not read them
all. It finds a file that is torn, or was edited; it does not stop somebody who may write the file.
Source: docs/security.md "Users"; tests/daemon/test_users_file.py.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from headrace_daemon.access.cipher import WrongKey
from headrace_daemon.access.errors import AccessError
from headrace_protocol.drivers.files import NotPrivate, read_private, replace_file
from headrace_protocol.errors import reason_of
from headrace_protocol.rights.rules import Action, BadRule, Entry, Resource, Rules
from headrace_protocol.rights.users import NO_RULES, User, UserKind, UserStatus, Verifier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from headrace_daemon.access.cipher import Cipher
    from headrace_protocol.drivers.files import Replace

_FORMAT: Final = 1
_SEAL: Final = b'\n],"seal":"'
_BYTES_MAX: Final = 512 * 1024 * 1024
# As a line has that of a user without a password.
_NO_VERIFIER: Final = Verifier(b"", 0, b"", b"")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Account(NamedTuple):
    """A user with its rules."""

    user: User
    rules: Rules = NO_RULES


class _Line(msgspec.Struct, omit_defaults=True, rename="camel"):
    """A user in the file. secret: the password in clear; encrypted: under the key of the daemon.

    salt, iterations, stored_key, server_key: the verifier, if there is one. custom, default: the
    rules, as in ``Allow Pub,Sub Topic:orders* 192.0.2.0/24 ::1``.
    """

    name: str
    kind: UserKind
    status: UserStatus
    salt: bytes = b""
    iterations: int = 0
    stored_key: bytes = b""
    server_key: bytes = b""
    secret: str | None = None
    encrypted: bytes | None = None
    custom: list[str] = msgspec.field(default_factory=list)
    default: list[str] = msgspec.field(default_factory=list)


class _Head(msgspec.Struct):
    """owner: the daemon whose users they are."""

    format: int
    owner: str


class _Encoded(NamedTuple):
    """The line of one very account. digest: its SHA-256."""

    account: Account
    line: bytes
    digest: bytes


class UsersFile:
    """The users of one daemon on disk, mode 0600; each change replaces the file.

    owner: the daemon, as in ``broker DefaultCluster/broker-a``. cipher: of the passwords.
    replace: writes the file, whole or not at all; with the room that its daemon keeps for that.
    has_clear_secrets: whether the next save encrypts passwords that the file has in clear.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        cipher: Cipher | None = None,
        replace: Replace = replace_file,
    ) -> None:
        self.path = path
        self._replace = replace
        self._owner = owner
        self._cipher = cipher
        self.has_clear_secrets = False
        # The lines of the last save or load.
        self._lines: dict[str, _Encoded] = {}

    # -- reading -----------------------------------------------------------------------------------

    def load(self) -> dict[str, Account]:
        """All users by name; none without a file. Raises AccessError with a remedy."""
        try:
            owner, lines = read_sealed(self.path)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise AccessError(f"{self.path}: cannot read the users: {reason_of(error)}") from None
        if owner != self._owner:
            raise AccessError(
                f"{self.path}: has the users of {owner}, and this is {self._owner}: give the "
                "daemon its former name, or move the file away and make the users again"
            )
        return dict(map(self._account, lines))

    def _account(self, data: bytes) -> tuple[str, Account]:
        line = _decoded(self.path, data, _Line)
        verifier = Verifier(line.salt, line.iterations, line.stored_key, line.server_key)
        known = verifier if verifier != _NO_VERIFIER else None
        secret = line.secret if line.encrypted is None else self._decrypted(line)
        try:
            rules = Rules(map(_entry, line.custom), map(_entry, line.default))
        except (BadRule, ValueError) as error:
            raise _damaged(self.path, str(error)) from None
        account = Account(User(line.name, line.kind, line.status, known, secret), rules)
        if self._cipher is not None and line.secret is not None:
            self.has_clear_secrets = True
        else:
            self._lines[line.name] = _Encoded(account, data, _digest(data))
        return line.name, account

    def _decrypted(self, line: _Line) -> str:
        assert line.encrypted is not None
        if self._cipher is None:
            raise AccessError(
                f"{self.path}: its passwords are encrypted: set authKeyFile to the key's file"
            )
        try:
            return self._cipher.decrypt(line.name, line.encrypted)
        except WrongKey:
            raise AccessError(
                f"{self.path}: another key than that of authKeyFile has encrypted its passwords: "
                "set the former one"
            ) from None

    # -- writing -----------------------------------------------------------------------------------

    def save(self, accounts: Mapping[str, Account]) -> None:
        """Replace the file; it is on disk when this returns. In any thread, one at a time.

        Raises OSError.
        """
        head = b'{"format":%d,"owner":%b,"users":[' % (_FORMAT, msgspec.json.encode(self._owner))
        encoded = self._encoded(accounts)
        seal = _end((_digest(head), *(each.digest for each in encoded)))
        # Not joined: a copy of megabytes would keep the loop waiting.
        parts = [part for each in encoded for part in (b",\n", each.line)]
        self._replace(self.path, (head, b"\n", *parts[1:], seal))

    def _encoded(self, accounts: Mapping[str, Account]) -> list[_Encoded]:
        """A line for each user; only those of accounts that have changed are made."""
        lines = self._lines
        for name in lines.keys() - accounts.keys():
            del lines[name]
        for name, account in accounts.items():
            if name not in lines or lines[name].account is not account:
                line = msgspec.json.encode(self._line(account))
                lines[name] = _Encoded(account, line, _digest(line))
        return list(lines.values())

    def _line(self, account: Account) -> _Line:
        user, rules = account
        encrypted = self._encrypted(user)
        return _Line(
            user.name,
            user.kind,
            user.status,
            *(user.verifier or _NO_VERIFIER),
            secret=user.secret if encrypted is None else None,
            encrypted=encrypted,
            custom=list(map(_rule, rules.custom)),
            default=list(map(_rule, rules.default)),
        )

    def _encrypted(self, user: User) -> bytes | None:
        if self._cipher is None or user.secret is None:
            return None
        return self._cipher.encrypt(user.name, user.secret)


def read_sealed(path: Path) -> tuple[str, list[bytes]]:
    """The daemon whose users a file has, and a line for each of them.

    Raises AccessError, OSError.
    """
    try:
        data = read_private(path, _BYTES_MAX)
    except NotPrivate as error:
        raise AccessError(str(error)) from None
    first, _, _ = data.partition(b"\n")
    head = _decoded(path, first + b"]}", _Head)
    if head.format != _FORMAT:
        raise AccessError(
            f"{path}: has format {head.format}, and this version reads {_FORMAT}: start "
            "the version that wrote it"
        )
    end = data.rfind(_SEAL)
    rest = data[len(first) + 1 : max(end, 0)]
    lines = rest.split(b",\n") if rest else []
    if end < 0 or data[end:] != _end(map(_digest, (first, *lines))):
        raise _damaged(path, "does not match its seal")
    return head.owner, lines


def super_users(path: Path) -> list[str]:
    """The names of Super users in a file, whatever its state. Raises OSError."""
    names = []
    for data in path.read_bytes().splitlines():
        try:
            line = msgspec.json.decode(data.removesuffix(b","), type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if line.kind is UserKind.SUPER:
            names.append(line.name)
    return sorted(names)


def _decoded(path: Path, data: bytes, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> AccessError:
    return AccessError(
        f"{path}: was changed by hand, or damaged: {reason}; put a good copy in its "
        "place, or move it away to start without users"
    )


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()


def _end(digests: Iterable[bytes]) -> bytes:
    return _SEAL + hashlib.sha256(b"".join(digests)).hexdigest().encode() + b'"}\n'


def _rule(entry: Entry) -> str:
    actions = ",".join(action.value for action in Action if action in entry.actions)
    words = entry.decision.value, actions, str(entry.resource), *map(str, entry.networks)
    return " ".join(words)


def _entry(rule: str) -> Entry:
    decision, actions, resource, *addresses = rule.split(" ")
    like = _entry_of_all(decision, actions, tuple(addresses))
    return like._replace(resource=Resource.parse(resource))


@lru_cache(maxsize=1024)
def _entry_of_all(decision: str, actions: str, addresses: tuple[str, ...]) -> Entry:
    """The rule for all resources; most rules differ in theirs only."""
    return Entry.parse("*", actions.split(","), addresses, decision)
