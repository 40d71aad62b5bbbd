"""Opening of a daemon's access control: its users from their file, and those of the first start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_daemon.access.accounts import Accounts
from headrace_daemon.access.changes import created
from headrace_daemon.access.errors import AccessError
from headrace_daemon.access.sessions import Sessions
from headrace_daemon.access.user_requests import NoUsers, UserRequests
from headrace_daemon.access.users_file import UsersFile
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.access import Access
from headrace_protocol.rights.auth_requests import UserInfo
from headrace_protocol.rights.users import UserKind, Users
from headrace_protocol.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from headrace_daemon.access.settings import AccessConfig
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.rights.credentials import Credentials
    from headrace_protocol.rights.users import User

# The daemon itself, which makes the users of its settings.
_ITSELF: Final = Subject(None, "", is_super=True)
_HOW: Final = (
    'to make it, write {"username":"root","password":"..."} to a file that only this user may '
    "read (chmod 600), name it in initAuthenticationUserFile, and start again; or set "
    "HEADRACE_INIT_AUTHENTICATION_USER to that text"
)


class OpenedAccess(NamedTuple):
    """users: with their rules. access: decides by them. requests: serve those about them.

    sessions: log-ins; None without authentication.
    """

    users: Users
    access: Access
    requests: UserRequests | NoUsers
    sessions: Sessions | None


def open_access(
    config: AccessConfig, path: Path, owner: str, cluster: str, log: HostLog
) -> OpenedAccess:
    """The access control of a daemon that starts; makes the users that its settings name.

    path: the users' file. owner: see ``UsersFile``. cluster: see ``Access``. log: see
    ``UserRequests``. Raises AccessError.
    """
    if not config.settings.authentication:
        users = Users()
        return OpenedAccess(users, Access(config.settings, users, cluster), NoUsers(), None)
    file = UsersFile(path, owner, config.cipher)
    accounts = _opened(file)
    for credentials in filter(None, (config.initial, config.inner)):
        _make(accounts, credentials)
    _check_super(path, accounts.users.users.values())
    return OpenedAccess(
        accounts.users,
        Access(config.settings, accounts.users, cluster),
        UserRequests(accounts, log, exports=config.exports),
        Sessions(accounts.users, log),
    )


def check_users(config: AccessConfig, path: Path, owner: str) -> None:
    """Raise AccessError if a daemon could not start with the file; writes nothing."""
    if config.settings.authentication:
        loaded = UsersFile(path, owner, config.cipher).load()
        if config.initial is None and config.inner is None:
            _check_super(path, [account.user for account in loaded.values()])


def _opened(file: UsersFile) -> Accounts:
    loaded = file.load()
    if file.has_clear_secrets:
        try:
            file.save(loaded)
        except OSError as error:
            raise AccessError(f"{file.path}: passwords can't be encrypted: {error}") from None
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
