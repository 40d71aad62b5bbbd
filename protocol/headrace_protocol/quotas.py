"""Quotas: how much of a daemon a user, a topic or a group may take.

Source: docs/security.md "Quotas"; docs/protocol.md "Quotas".
"""

from __future__ import annotations

from typing import Final, Literal

from headrace_protocol.bodies import Body
from headrace_protocol.bounds import NAME_CHARS_MAX
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError

# Extension fields of an answer that refuses a request for a quota, for clients to wait.
SLOW_STAGE: Final = "slowStage"
RETRY_AFTER_MS: Final = "retryAfterMs"
QUOTA_STAGE: Final = "quota"
# A rate below this one would hold a connection back for longer than clients wait.
RATE_MIN: Final = 0.001


# Whose a quota is; a user may be an address, of clients that do not log in.
Of = Literal["user", "topic", "group"]


class Quota(Body, omit_defaults=True, kw_only=True):
    """The limits of one user, topic or group; None for no limit.

    of, name: whose; the name ``*`` of a user is each user that has no quota of its own.
    requests: a second; of topics and groups, those whose header names them.
    bytes_in, bytes_out: bytes a second, of frames for users, of message bodies for topics and
    groups. cpu: share of the daemon's loop, up to 1.
    connections, held_pulls, topics, groups, staged_bytes: at a time.
    """

    of: Of
    name: str
    requests: float | None = None
    bytes_in: float | None = None
    bytes_out: float | None = None
    cpu: float | None = None
    connections: int | None = None
    held_pulls: int | None = None
    topics: int | None = None
    groups: int | None = None
    staged_bytes: int | None = None

    @property
    def limits(self) -> list[str]:
        """The names of its limits."""
        return [limit for limit in LIMITS["user"] if getattr(self, limit) is not None]

    @property
    def counts_channels(self) -> bool:
        """True if it limits the connections, or what is held for them."""
        return self.connections is not None or self.held_pulls is not None

    def check(self) -> None:
        """Raise RequestError for limits that can't be kept."""
        what = f"the quota of {self.of} {self.name}"
        if not 0 < len(self.name) <= NAME_CHARS_MAX:
            raise _bad(f"a quota of a {self.of} without a name of 1 to {NAME_CHARS_MAX}")
        if self.name == ANY and self.of != "user":
            raise _bad(f"{what}: only users have a quota in common, *")
        for limit in self.limits:
            value = getattr(self, limit)
            if limit not in LIMITS[self.of]:
                known = ", ".join(LIMITS[self.of])
                raise _bad(f"{what}: {limit} is no limit of a {self.of}, which has {known}")
            least = RATE_MIN if limit in RATES else 1
            if not least <= value < float("inf"):
                raise _bad(f"{what}: {limit}={value:g}: must be a number, at least {least:g}")
        if self.cpu is not None and self.cpu > 1:
            raise _bad(f"{what}: cpu={self.cpu:g} is above 1, the whole loop")

    def at_nameserver(self) -> Quota | None:
        """Its limits that nameservers apply; None for a topic's or group's, which have none."""
        if self.of != "user":
            return None
        kept = {limit: getattr(self, limit) for limit in NAMESERVER_LIMITS}
        return Quota(of=self.of, name=self.name, **kept)


ANY: Final = "*"
RATES: Final = ("requests", "bytes_in", "bytes_out", "cpu")
LIMITS: Final[dict[Of, tuple[str, ...]]] = {
    "user": (*RATES, "connections", "held_pulls", "topics", "groups", "staged_bytes"),
    "topic": RATES,
    "group": ("requests", "bytes_out", "cpu"),
}
# Limits of users at nameservers; the others are about what only brokers have.
NAMESERVER_LIMITS: Final = (*RATES, "connections")


def shown(limit: str, value: float) -> str:
    """A limit as text, such as ``10.0 MB/s``."""
    if limit == "staged_bytes":
        return f"{shown('bytes_in', value).removesuffix('/s')} staged"
    if limit in {"bytes_in", "bytes_out"}:
        return f"{value / 1e6:.1f} MB/s" if value >= 1e5 else f"{value:g} bytes/s"
    if limit == "cpu":
        return f"{value:.0%} of the loop"
    return f"{value:g} {limit.replace('_', ' ')}" + ("/s" if limit == "requests" else "")


class QuotaList(Body, kw_only=True):
    """The answer to LIST_QUOTAS, and a daemon's file."""

    quotas: list[Quota]


def _bad(reason: str) -> RequestError:
    return RequestError(ResponseCode.INVALID_PARAMETER, reason)
