"""Changes of users and rules, with the remarks of Apache RocketMQ's broker.

Only Super users change Super users, and the last one that is enabled stays. Nobody but a Super user
changes the rules of its own.
Source: docs/protocol.md "Users and rules"; tests/daemon/test_user_requests.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from headrace_daemon.access.accounts import Edit
from headrace_daemon.access.users_file import Account
from headrace_protocol.bounds import OutOfBounds
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.auth_requests import check_password, check_user_name
from headrace_protocol.rights.auth_rules import PolicyType, rules_of
from headrace_protocol.rights.credentials import BadCredentials
from headrace_protocol.rights.rules import BadRule, Rules
from headrace_protocol.rights.users import User, UserKind, UserStatus
from headrace_protocol.subject import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from headrace_daemon.access.accounts import Change
    from headrace_protocol.rights.auth_requests import AclInfo, UserInfo
    from headrace_protocol.rights.rules import Entry, Resource
    from headrace_protocol.rights.users import Verifier
    from headrace_protocol.subject import Subject

USERS_MAX: Final = 20_000
# Of one user, and of all.
RULES_MAX: Final = 1_000
ALL_RULES_MAX: Final = 400_000

_Read = TypeVar("_Read")
_Word = TypeVar("_Word", UserKind, UserStatus)

_SUPER_ONLY: Final = "The super user can only be update by super user"


def refused(remark: str) -> RequestError:
    """The answer to what can't be done; Apache has one code for this and for a lack of rights."""
    return RequestError(ResponseCode.NO_PERMISSION, remark)


def bad_rules_refused(read: Callable[[], _Read]) -> _Read:
    """What is read of a request about rules. Raises RequestError for what can't be used."""
    try:
        return read()
    except BadRule as error:
        raise refused(str(error)) from None


# -- users -----------------------------------------------------------------------------------------


def created(name: str, info: UserInfo, subject: Subject) -> Change:
    """Make a user. subject: the user whose request this is. Raises RequestError."""
    check_user_name(name)
    if name == ANONYMOUS:
        raise OutOfBounds(f"username {ANONYMOUS}: stands for requests without a user")
    kind = _word(UserKind, "userType", info.user_type) or UserKind.NORMAL
    status = _word(UserStatus, "userStatus", info.user_status) or UserStatus.ENABLE
    password = _new_password(info)
    if kind is UserKind.SUPER and not subject.is_super:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR, "The super user can only be create by super user"
        )
    secret = None if info.signatures is False else password

    def change(accounts: Mapping[str, Account]) -> Edit:
        if name in accounts:
            raise refused("The user is existed")
        if len(accounts) >= USERS_MAX:
            raise OutOfBounds(f"there are {len(accounts)} users, the maximum: delete some first")
        verifier = None if password is None else _verifier_of(password)
        return Edit(name, Account(User(name, kind, status, verifier, secret)))

    return change


def updated(name: str, info: UserInfo, subject: Subject) -> Change:
    """Change what ``info`` has of a user. Raises RequestError."""
    check_user_name(name)
    kind = _word(UserKind, "userType", info.user_type)
    status = _word(UserStatus, "userStatus", info.user_status)
    if info.password is not None or info.no_password:
        _new_password(info)
    elif info.signatures:
        raise OutOfBounds("signatures=true needs the password, which this daemon does not keep")

    def change(accounts: Mapping[str, Account]) -> Edit:
        account = accounts.get(name)
        if account is None:
            raise refused("The user is not exist")
        _check_super(account.user, subject)
        if kind is UserKind.SUPER and not subject.is_super:
            raise RequestError(ResponseCode.SYSTEM_ERROR, _SUPER_ONLY)
        user = account.user._replace(
            kind=kind or account.user.kind, status=status or account.user.status
        )
        if not (user.is_super and user.is_enabled):
            _check_not_last(accounts, name)
        return Edit(name, account._replace(user=_with_password(user, info)))

    return change


def _new_password(info: UserInfo) -> str | None:
    """The password of a request; None for a user without one. Raises RequestError."""
    if not info.no_password:
        password = info.password or ""
        check_password(password)
        return password
    if info.password is not None or info.signatures:
        raise OutOfBounds("noPassword=true: with a password, or with signatures, which need one")
    return None


def _with_password(user: User, info: UserInfo) -> User:
    """The user with the new password, if there is one; it is kept only for signatures."""
    if info.no_password:
        return user._replace(verifier=None, secret=None)
    if info.password is not None:
        user = user._replace(verifier=_verifier_of(info.password))
        if user.secret is not None or info.signatures:
            user = user._replace(secret=info.password)
    return user._replace(secret=None) if info.signatures is False else user


def deleted(name: str, subject: Subject) -> Change:
    """Delete a user with its rules; nothing happens if there is none."""
    check_user_name(name)

    def change(accounts: Mapping[str, Account]) -> Edit | None:
        if name not in accounts:
            return None
        _check_super(accounts[name].user, subject)
        _check_not_last(accounts, name)
        return Edit(name, None)

    return change


def _check_super(user: User, subject: Subject) -> None:
    if user.is_super and not subject.is_super:
        raise refused(_SUPER_ONLY)


def _check_not_last(accounts: Mapping[str, Account], name: str) -> None:
    """Raise RequestError if ``name`` is the only enabled Super user."""
    supers = {each.name for each, _ in accounts.values() if each.is_super and each.is_enabled}
    if supers == {name}:
        raise refused(
            f"{name} is the last enabled Super user, without whom nobody could make another: make "
            "one first"
        )


def _word(words: type[_Word], field: str, text: str | None) -> _Word | None:
    """The word in any case; None without text. Raises OutOfBounds."""
    if not text:
        return None
    for word in words:
        if word.value.lower() == text.lower():
            return word
    raise OutOfBounds(
        f"{field} {text[:40]!r}: expected {' or '.join(word.value for word in words)}"
    )


def _verifier_of(password: str) -> Verifier:
    # The library of SCRAM takes long to import.
    from headrace_protocol.rights.session import verifier_of

    try:
        return verifier_of(password)
    except BadCredentials as error:
        raise OutOfBounds(str(error)) from None


# -- rules -----------------------------------------------------------------------------------------


def ruled(name: str, info: AclInfo, subject: Subject) -> Change:
    """Add rules to those of a user; they replace the ones of the same resources.

    They are read with the change, in its thread: there may be thousands.
    """

    def change(accounts: Mapping[str, Account]) -> Edit:
        account = accounts.get(name)
        if account is None:
            raise refused(f"The subject of User:{name} is not exist.")
        _check_rules_of(account.user, subject)
        old, rules = account.rules, bad_rules_refused(lambda: rules_of(info))
        merged = Rules(_merged(old.custom, rules.custom), _merged(old.default, rules.default))
        _check_room(accounts, name, merged)
        return Edit(name, account._replace(rules=merged))

    return change


def unruled(name: str, kind: PolicyType, resource: Resource | None, subject: Subject) -> Change:
    """Delete the rules of one type for a resource; without a resource, all rules of a user."""

    def change(accounts: Mapping[str, Account]) -> Edit:
        account = accounts.get(name)
        if account is None:
            raise refused("The subject is not exist.")
        if account.rules.is_empty:
            raise refused("The acl is not exist.")
        _check_rules_of(account.user, subject)
        return Edit(name, account._replace(rules=_without(account.rules, kind, resource)))

    return change


def _without(rules: Rules, kind: PolicyType, resource: Resource | None) -> Rules:
    if resource is None:
        return Rules()
    custom, default = (
        [each for each in entries if kind is not whose or each.resource != resource]
        for whose, entries in (
            (PolicyType.CUSTOM, rules.custom),
            (PolicyType.DEFAULT, rules.default),
        )
    )
    return Rules(custom, default)


def _check_rules_of(user: User, subject: Subject) -> None:
    _check_super(user, subject)
    if user.name == subject.user and not subject.is_super:
        raise refused(f"User:{user.name} may not change its own rules: ask a Super user")


def _merged(old: Iterable[Entry], new: Iterable[Entry]) -> list[Entry]:
    by_resource = _by_resource(old) | _by_resource(new)
    return [entry for entries in by_resource.values() for entry in entries]


def _by_resource(entries: Iterable[Entry]) -> dict[Resource, list[Entry]]:
    found: dict[Resource, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.resource, []).append(entry)
    return found


def _check_room(accounts: Mapping[str, Account], name: str, rules: Rules) -> None:
    count = _count(rules)
    if count > RULES_MAX:
        raise OutOfBounds(
            f"{count} rules of User:{name}: the maximum is {RULES_MAX}; a * at the end of a name "
            "stands for many resources"
        )
    total = sum(_count(each.rules) for each in accounts.values())
    if total + count - _count(accounts[name].rules) > ALL_RULES_MAX:
        raise OutOfBounds(f"{total} rules of all users: the maximum is {ALL_RULES_MAX}")


def _count(rules: Rules) -> int:
    return len(rules.custom) + len(rules.default)
