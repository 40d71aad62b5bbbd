"""What a daemon permits as long as nobody who connects can prove an identity.

Source: docs/security.md.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Literal

from headrace_protocol.codes import RequestCode

if TYPE_CHECKING:
    from headrace_protocol.serving import Registry

# deny: serve this machine only. read: other machines too, but nobody may administer. allow: all.
AnonymousAccess = Literal["deny", "read", "allow"]

# Requests that change anything but messages, offsets and the sender's own membership. Brokers
# register with REGISTER_BROKER, so a nameserver can't refuse that.
ADMINISTRATIVE: Final = frozenset(
    (
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
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
    )
)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def why_exposed(bind_address: str, access: AnonymousAccess) -> str | None:
    """Why a daemon must not listen there without a word from its administrator, if so."""
    if access != "deny" or is_loopback(bind_address):
        return None
    return (
        "other machines reach this address, and without authentication everybody there may read, "
        "write and administer: set anonymousAccess=allow to permit that (read: all of it but "
        "administration), or leave bindAddress out to serve this machine only"
    )


def restrict(registry: Registry, access: AnonymousAccess) -> None:
    """Take administration out of a table of functions that is complete."""
    if access == "read":
        registry.forbid(
            ADMINISTRATIVE,
            "anonymousAccess=read lets nobody administer this daemon; "
            "set anonymousAccess=allow and restart it to permit administration",
        )
