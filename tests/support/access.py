"""A daemon's access control with its requests, without a daemon."""

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from headrace_daemon.access.opening import OpenedAccess, open_access
from headrace_daemon.access.settings import AccessConfig
from headrace_daemon.host_log import HostLog
from headrace_protocol.codes import RequestCode
from headrace_protocol.frame import FrameReader
from headrace_protocol.rights.access import AccessSettings
from headrace_protocol.rights.auth_requests import (
    AclHeader,
    AclInfo,
    PolicyEntryInfo,
    PolicyInfo,
    UserHeader,
    UserInfo,
)
from headrace_protocol.rights.credentials import Credentials
from headrace_protocol.serving import Registry
from tests.support.channel import MemoryChannel
from tests.support.nameserver import frame

ROOT = Credentials("root", "rootsecret")
CHECKED = AccessSettings(authentication=True, authorization=True)
OWNER = "broker c0/b0"


def opened(folder: Path, config: AccessConfig | None = None, owner: str = OWNER) -> OpenedAccess:
    """The access control of a daemon with its users in ``folder``; root is its Super user."""
    config = config or AccessConfig(CHECKED, ROOT)
    log = HostLog(structlog.get_logger("headrace.test"))
    return open_access(config, folder / "users.json", owner, "c0", log)


def session(user: str, *, is_encrypted: bool = False) -> MemoryChannel:
    """A connection that a user has logged in on."""
    channel = MemoryChannel()
    channel.log_in(user)
    channel.is_encrypted = is_encrypted
    return channel


class UsersUnderTest:
    """Serves requests about users and rules as a daemon does, guard included."""

    def __init__(self, folder: Path, config: AccessConfig | None = None) -> None:
        self.path = folder / "users.json"
        self.users, self.access, self.requests, _ = opened(folder, config)
        self.unexpected: list[Exception] = []
        self.registry = Registry(lambda _, error: self.unexpected.append(error))
        self.requests.register(self.registry)
        self.registry.guard(self.access.check)

    def ask(
        self,
        code: RequestCode,
        header: msgspec.Struct | None = None,
        body: bytes = b"",
        by: str | MemoryChannel = "root",
    ) -> tuple[int, str, bytes]:
        """Code, remark and body of the answer to a request of a user."""
        channel = session(by) if isinstance(by, str) else by
        self.registry.handle(channel, FrameReader().feed(frame(code, header, body)))
        ((command, answer),) = channel.replies()
        return command.code, command.remark or "", answer

    def change_user(
        self, code: RequestCode, name: str, by: str = "root", **fields: str | bool | None
    ) -> tuple[int, str, bytes]:
        """AUTH_CREATE_USER or AUTH_UPDATE_USER as mqadmin sends it."""
        body = UserInfo(username=name, **fields).encode()  # type: ignore[arg-type]
        return self.ask(code, UserHeader(username=name), body, by)

    def make(self, name: str, by: str = "root", **fields: str | bool | None) -> None:
        """A user with a password."""
        fields.setdefault("password", f"{name}-password")
        answer = self.change_user(RequestCode.AUTH_CREATE_USER, name, by, **fields)
        assert answer == (0, "", b"")

    def rule(
        self,
        name: str,
        *entries: PolicyEntryInfo,
        code: RequestCode = RequestCode.AUTH_CREATE_ACL,
        by: str = "root",
        kind: str | None = None,
    ) -> tuple[int, str, bytes]:
        """Give rules to a user."""
        body = acl_of(name, *entries, kind=kind).encode()
        return self.ask(code, AclHeader(subject=f"User:{name}"), body, by)


def acl_of(name: str, *entries: PolicyEntryInfo, kind: str | None = None) -> AclInfo:
    """The body of a request that gives rules to a user."""
    policy = PolicyInfo(entries=list(entries), policy_type=kind)
    return AclInfo(policies=[policy], subject=f"User:{name}")


def entry(
    resource: str, *actions: str, decision: str = "Allow", addresses: list[str] | None = None
) -> PolicyEntryInfo:
    """A rule as requests have it."""
    return PolicyEntryInfo(
        actions=list(actions), decision=decision, resource=resource, source_ips=addresses
    )
