"""Requests about users and rules, 3001 to 3010, at both daemons.

Passwords are never answered, except to a Super user over TLS where ``authExportEnable`` permits the
copy of users. Source: docs/protocol.md "Users and rules"; tests/daemon/test_user_requests.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_daemon.access.changes import (
    bad_rules_refused,
    created,
    deleted,
    refused,
    ruled,
    unruled,
    updated,
)
from headrace_protocol.bounds import OutOfBounds, check_items
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import FRAME_BYTES_MAX
from headrace_protocol.rights.auth_requests import (
    AclHeader,
    AclInfo,
    DeleteAclHeader,
    ListAclHeader,
    ListUserHeader,
    UserHeader,
    UserInfo,
)
from headrace_protocol.rights.auth_rules import (
    PolicyType,
    acl_info,
    resource_of,
    subject_of,
    user_of,
)
from headrace_protocol.serving import Reply
from headrace_protocol.subject import Subject
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_daemon.access.accounts import Accounts
    from headrace_daemon.host_log import HostLog
    from headrace_protocol.frame import Buffer
    from headrace_protocol.rights.users import User
    from headrace_protocol.serving import LongFunction, Registry, Request

_NOBODY: Final = Subject(None, "")
# A frame has a header, too.
_LIST_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024


class UserRequests:
    """Serves them from the accounts of a daemon.

    exports: see ``AccessConfig``. log: for changes by clients. list_bytes_max: of an answer.
    """

    def __init__(self, accounts: Accounts, log: HostLog, *, exports: bool) -> None:
        self._accounts = accounts
        self._users = accounts.users
        self._log = log
        self._exports = exports
        self.list_bytes_max = _LIST_BYTES_MAX

    def register(self, registry: Registry) -> None:
        """Route all of them."""
        functions: dict[RequestCode, LongFunction] = {
            RequestCode.AUTH_CREATE_USER: self.create_user,
            RequestCode.AUTH_UPDATE_USER: self.update_user,
            RequestCode.AUTH_DELETE_USER: self.delete_user,
            RequestCode.AUTH_LIST_USER: self.list_users,
            RequestCode.AUTH_CREATE_ACL: self.change_rules,
            RequestCode.AUTH_UPDATE_ACL: self.change_rules,
            RequestCode.AUTH_DELETE_ACL: self.delete_rules,
            RequestCode.AUTH_LIST_ACL: self.list_rules,
        }
        for code, function in functions.items():
            registry.route_long(code, function)
        registry.route(RequestCode.AUTH_GET_USER, self.get_user)
        registry.route(RequestCode.AUTH_GET_ACL, self.get_rules)

    # -- users -------------------------------------------------------------------------------------

    async def create_user(self, request: Request) -> Reply | None:
        """AUTH_CREATE_USER (3001)."""
        name, info = _named_user(request)
        await self._accounts.change(created(name, info, _subject(request)))
        return self._changed(request, "user created", user=name)

    async def update_user(self, request: Request) -> Reply | None:
        """AUTH_UPDATE_USER (3002)."""
        name, info = _named_user(request)
        await self._accounts.change(updated(name, info, _subject(request)))
        return self._changed(request, "user changed", user=name)

    async def delete_user(self, request: Request) -> Reply | None:
        """AUTH_DELETE_USER (3003)."""
        name = request.header(UserHeader).username
        await self._accounts.change(deleted(name, _subject(request)))
        return self._changed(request, "user deleted", user=name)

    def get_user(self, request: Request) -> Reply:
        """AUTH_GET_USER (3004)."""
        user = self._users.users.get(request.header(UserHeader).username)
        return Reply() if user is None else _body(self._info(user, request))

    async def list_users(self, request: Request) -> Reply | None:
        """AUTH_LIST_USER (3005): the users with a part of a name."""
        part = request.header(ListUserHeader).filter
        users = self._users.users
        found = (users.get(name) if part in name else None for name in sorted(users))
        return await self._list(user and self._info(user, request) for user in found)

    def _info(self, user: User, request: Request) -> UserInfo:
        is_export = self._exports and _subject(request).is_super and request.channel.is_encrypted
        return UserInfo(
            no_password=True if user.verifier is None else None,
            password=user.secret if is_export else None,
            signatures=False if user.secret is None else None,
            user_status=user.status.value,
            user_type=user.kind.value,
            username=user.name,
        )

    # -- rules -------------------------------------------------------------------------------------

    async def change_rules(self, request: Request) -> Reply | None:
        """AUTH_CREATE_ACL (3006), AUTH_UPDATE_ACL (3007)."""
        info = _acl(request.body)
        name = _one_name(request.header(AclHeader).subject, info.subject or "")
        if not any(policy.entries for policy in info.policies):
            raise refused("The policies is empty.")
        await self._accounts.change(ruled(name, info, _subject(request)))
        return self._changed(request, "rules changed", user=name)

    async def delete_rules(self, request: Request) -> Reply | None:
        """AUTH_DELETE_ACL (3008)."""
        header = request.header(DeleteAclHeader)
        name = bad_rules_refused(lambda: user_of(header.subject))
        kind = bad_rules_refused(lambda: PolicyType.parse(header.policy_type or None))
        text = header.resource
        resource = bad_rules_refused(lambda: resource_of(text)) if text else None
        await self._accounts.change(unruled(name, kind, resource, _subject(request)))
        return self._changed(request, "rules deleted", user=name, resource=text or "all")

    def get_rules(self, request: Request) -> Reply:
        """AUTH_GET_ACL (3009)."""
        subject = request.header(AclHeader).subject
        name = bad_rules_refused(lambda: user_of(subject))
        if name not in self._users.users:
            raise refused("The subject is not exist.")
        info = acl_info(name, self._users.rules(name))
        return Reply() if info is None else _body(info)

    async def list_rules(self, request: Request) -> Reply | None:
        """AUTH_LIST_ACL (3010): the rules of subjects and resources with a part of a text."""
        header = request.header(ListAclHeader)
        part, resource = header.subject_filter, header.resource_filter
        return await self._list(
            acl_info(name, self._users.rules(name), resource) if part in subject_of(name) else None
            for name in sorted(self._users.users)
        )

    async def _list(self, infos: Iterable[msgspec.Struct | None]) -> Reply:
        """A list of all but None, made in slices; without items, an empty body."""
        parts: list[bytes] = []
        size = 0
        for info in infos:
            if info is not None:
                parts.append((b"," if parts else b"[") + msgspec.json.encode(info))
                size += len(parts[-1])
                self._check_size(size)
            await take_break()
        return Reply(body=(*parts, b"]")) if parts else Reply()

    def _check_size(self, size: int) -> None:
        if size > self.list_bytes_max:
            raise OutOfBounds(
                f"the answer has over {self.list_bytes_max} bytes, the maximum: ask for a part, by "
                "a filter"
            )

    def _changed(self, request: Request, what: str, **fields: str) -> Reply:
        by = _subject(request).user
        self._log.info(request.channel.address, what, **fields, by=by)
        return Reply()


def _subject(request: Request) -> Subject:
    return request.subject or _NOBODY


def _named_user(request: Request) -> tuple[str, UserInfo]:
    """The name in header and body, and the body. Raises RequestError where they differ."""
    name, info = request.header(UserHeader).username, UserInfo.decode(request.body)
    if info.username and name and info.username != name:
        raise OutOfBounds(f"username {name!r} in the header, {info.username!r} in the body")
    return name or info.username or "", info


def _acl(body: Buffer) -> AclInfo:
    if not body:
        raise RequestError(ResponseCode.SYSTEM_ERROR, "The body of acl is null")
    info = AclInfo.decode(body)
    for policy in info.policies:
        check_items("rules", policy.entries)
    return info


def _one_name(header: str, body: str) -> str:
    """The user of the subject in header and body. Raises RequestError where they differ."""
    name = bad_rules_refused(lambda: user_of(body or header))
    if header and bad_rules_refused(lambda: user_of(header)) != name:
        raise refused(f"The subject is {header} in the header, and {body} in the body")
    return name


def _body(info: msgspec.Struct) -> Reply:
    return Reply(body=(msgspec.json.encode(info),))
