"""Users of a daemon that starts: those of its file, and those of the first start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headrace_daemon.access.accounts import Accounts
from headrace_daemon.access.changes import created
from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.users_file import UsersFile
from headrace_protocol.errors import RequestError, reason_of
from headrace_protocol.rights.auth_requests import UserInfo
from headrace_protocol.rights.users import UserKind
from headrace_protocol.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from headrace_daemon.access.settings import AccessConfig
    from headrace_protocol.drivers.files import Replace
    from headrace_protocol.rights.credentials import Credentials
    from headrace_protocol.rights.users import User

# The daemon itself, which makes the users of its settings.
_ITSELF: Final = Subject(None, "", is_super=True)
_HOW: Final = (
    'to make it, write {"username":"root","password":"..."} to a file that only this user may '
    "read (chmod 600), name it in initAuthenticationUserFile, and start again; or set "
    "HEADRACE_INIT_AUTHENTICATION_USER to that text"
)


def open_accounts(config: AccessConfig, path: Path, owner: str, replace: Replace) -> Accounts:
    """All users, of which those of the settings are made if they are missing.

    replace: see ``UsersFile``. Raises AccessError.
    """
    file = UsersFile(path, owner, config.cipher, replace)
    accounts = _opened(file)
    for credentials in filter(None, (config.initial, config.inner)):
        _make(accounts, credentials)
    _check_super(path, accounts.users.users.values())
    return accounts


def check_accounts(config: AccessConfig, path: Path, owner: str) -> None:
    """Raise AccessError if ``open_accounts`` would; writes nothing."""
    loaded = UsersFile(path, owner, config.cipher).load()
    if config.initial is None and config.inner is None:
        _check_super(path, [account.user for account in loaded.values()])


def _opened(file: UsersFile) -> Accounts:
    loaded = file.load()
    if file.has_clear_secrets:
        try:
            file.save(loaded)
        except OSError as error:
            raise AccessError(
                f"{file.path}: passwords can't be encrypted: {reason_of(error)}"
            ) from None
    return Accounts(file, loaded)


def _make(accounts: Accounts, credentials: Credentials) -> None:
    """Make the Super user of a setting; one that exists is left as it is."""
    name, password = credentials
    if name in accounts.users.users:
        return
    info = UserInfo(password=password, user_type=UserKind.SUPER.value)
    try:
        accounts.change_now(created(name, info, _ITSELF))
    except RequestError as error:
        raise AccessError(f"user {name} can't be made: {error.remark}") from None


def _check_super(path: Path, users: Collection[User]) -> None:
    if not any(user.is_super and user.is_enabled for user in users):
        raise AccessError(
            f"authenticationEnabled=true: {path} has no enabled Super user, so nobody could make "
            f"one or give rights; {_HOW}"
        )
