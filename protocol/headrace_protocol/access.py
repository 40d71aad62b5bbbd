"""Access control without authentication: permitted clients, and the changes that they may make.

Source: docs/security.md.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Literal

from headrace_protocol.codes import RequestCode, ResponseCode, code_name
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_protocol.serving import Registry, Request

# deny: serve only this machine. read: serve others too, but reject administration.
# allow: serve everything.
AnonymousAccess = Literal["deny", "read", "allow"]

# Requests that change anything other than messages, offsets and the sender's own membership.
# REGISTER_BROKER is not among them: a nameserver is useless without it.
ADMINISTRATIVE: Final = frozenset(
    (
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
        RequestCode.DELETE_TOPIC_IN_BROKER,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        RequestCode.DELETE_SUBSCRIPTIONGROUP,
        RequestCode.UPDATE_BROKER_CONFIG,
        RequestCode.TRIGGER_DELETE_FILES,
        RequestCode.DELETE_EXPIRED_COMMITLOG,
        RequestCode.PUT_KV_CONFIG,
        RequestCode.DELETE_KV_CONFIG,
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.ADD_WRITE_PERM_OF_BROKER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.REGISTER_TOPIC_IN_NAMESRV,
        RequestCode.RESUME_CHECK_HALF_MESSAGE,
        RequestCode.COMPACT_TOPIC,
        RequestCode.FORGET_BROKER,
        RequestCode.TIER_RESUME,
        RequestCode.TIER_FORGET,
        RequestCode.SET_QUOTA,
    )
)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def why_exposed(bind_address: str, access: AnonymousAccess) -> str | None:
    """The reason why ``bind_address`` needs the administrator's consent; None if it needs none."""
    if access != "deny" or is_loopback(bind_address):
        return None
    return (
        "other machines reach this address, and without authentication anyone there may read, "
        "write and administer: set anonymousAccess=allow to permit that (read: everything except "
        "administration), or remove bindAddress to serve only this machine"
    )


def restrict(registry: Registry, access: AnonymousAccess) -> None:
    """Reject administrative requests if ``access`` is ``"read"``."""
    if access == "read":
        registry.guard(_refuse_administration, ADMINISTRATIVE)


def _refuse_administration(request: Request) -> Reply:
    return Reply(
        code=ResponseCode.NO_PERMISSION,
        remark=f"{code_name(request.command.code)} is rejected: this daemon runs with "
        "anonymousAccess=read; set anonymousAccess=allow and restart it to permit administration",
    )
