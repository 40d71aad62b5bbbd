"""Opening of a daemon's access control; without authentication, little of it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.files import replace_file
from headrace_protocol.errors import RequestError
from headrace_protocol.rights.access import Access
from headrace_protocol.rights.users import Users

if TYPE_CHECKING:
    from pathlib import Path

    from headrace_daemon.access.sessions import Sessions
    from headrace_daemon.access.settings import AccessConfig
    from headrace_daemon.access.tokens import Tokens
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.drivers.files import Replace
    from headrace_protocol.serving import Registry, Reply, Request

_FIRST, _LAST = RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_LIST_ACL
# The requests about users and rules.
CODES: Final = tuple(code for code in RequestCode if _FIRST <= code <= _LAST)


class Routed(Protocol):
    """Requests that are served."""

    def register(self, registry: Registry) -> None:
        """Route them."""


class OpenedAccess(NamedTuple):
    """users: with their rules. access: decides by them. requests: serve those about them.

    sessions: log-ins; None without authentication.
    """

    users: Users
    access: Access
    requests: Routed
    sessions: Sessions | None


def open_access(
    config: AccessConfig,
    path: Path,
    owner: str,
    cluster: str,
    log: HostLog,
    replace: Replace = replace_file,
) -> OpenedAccess:
    """The access control of a daemon that starts; makes the users that its settings name.

    path: the users' file. owner, replace: see ``UsersFile``. cluster: see ``Access``. log: for
    changes of users, and log-ins. Raises AccessError.
    """
    if not config.settings.authentication:
        users = Users()
        return OpenedAccess(users, Access(config.settings, users, cluster), NoUsers(), None)
    from headrace_daemon.access.sessions import Sessions
    from headrace_daemon.access.user_requests import UserRequests
    from headrace_daemon.access.users_opening import open_accounts

    accounts = open_accounts(config, path, owner, replace)
    return OpenedAccess(
        accounts.users,
        Access(config.settings, accounts.users, cluster),
        UserRequests(accounts, log, exports=config.exports),
        Sessions(
            accounts.users,
            log,
            tokens=_tokens(config),
            needs_tls=config.settings.needs_tls,
        ),
    )


def _tokens(config: AccessConfig) -> Tokens | None:
    """The verifier of tokens; None if a daemon takes none. Raises AccessError."""
    if config.tokens is None:
        return None
    from headrace_daemon.access.tokens import Tokens

    return Tokens(config.tokens)


def check_users(config: AccessConfig, path: Path, owner: str) -> None:
    """Raise AccessError if a daemon could not start with the file; writes nothing."""
    if config.settings.authentication:
        from headrace_daemon.access.users_opening import check_accounts

        check_accounts(config, path, owner)
        _tokens(config)


class NoUsers:
    """Refuses requests about users at a daemon without authentication, which keeps none."""

    def register(self, registry: Registry) -> None:
        """Route them."""
        for code in CODES:
            registry.route(code, _keep_none)


def _keep_none(_request: Request) -> Reply:
    raise RequestError(
        ResponseCode.NO_PERMISSION,
        "authenticationEnabled=false: this daemon keeps no users; set authenticationEnabled=true "
        "and restart it",
    )
