"""Holds clients back that take more than their quota, and refuses what can't wait.

The cost of a read is known once it is served. Its meters may owe something then, and the client is
not read until they owe nothing. Many clients may share a quota: while it owes too much for that,
requests are refused, with the time after which to try again.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from itertools import count as counting
from time import thread_time
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from headrace_daemon.buckets import Bucket, Recent
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.frame import frame_bytes
from headrace_protocol.quotas import (
    ANY,
    QUOTA_STAGE,
    RATES,
    RETRY_AFTER_MS,
    SLOW_STAGE,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_daemon.quotas.table import QuotaTable
    from headrace_daemon.serving.server import HoldBack, Serve
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_protocol.channel import Channel
    from headrace_protocol.frame import Frame
    from headrace_protocol.quotas import Of, Quota
    from headrace_protocol.serving import Registry

# The longest time that a client is held back: less than clients wait for an answer. The pulls of a
# group wait longer anyway.
_HOLD_S: Final = {"user": 2.0, "topic": 2.0, "group": 10.0}
# After a limit of things at a time, which end when their clients like.
RETRY_MS: Final = 1000
# The peer's consumers wait after FLOW_CONTROL, its producers after SYSTEM_BUSY.
_PULLS: Final = {
    RequestCode.PULL_MESSAGE,
    RequestCode.LITE_PULL_MESSAGE,
    RequestCode.BULK_PULL,
    RequestCode.POP_MESSAGE,
}
# A quota that is too small can be mended.
_ALWAYS_SERVED: Final = {RequestCode.SET_QUOTA, RequestCode.LIST_QUOTAS}
# Without them the members of a group look dead, and the others take their queues.
_SERVED_ABOVE_RATES: Final = {RequestCode.HEART_BEAT}
# A quota may be set while clients are held back for longer.
_TICK_S: Final = 0.05


class Meter:
    """The buckets of one user, topic or group.

    key: that of its quota. name: whose it is.
    channels: the connections of a user, where they are limited.
    is_refusing: whether it owed too much at the last look.
    """

    def __init__(self, quota: Quota, name: str) -> None:
        self.quota, self.key, self.name = quota, (quota.of, quota.name), name
        rates = ((limit, getattr(quota, limit)) for limit in RATES)
        self._buckets = {limit: Bucket(rate) for limit, rate in rates if rate is not None}
        self.channels: set[ServerChannel] = set()
        self.is_refusing = False

    def spend(self, limit: str, amount: float, now_s: float) -> None:
        """Note what was taken."""
        if (bucket := self._buckets.get(limit)) is not None:
            bucket.spend(amount, now_s)

    def hold_s(self, now_s: float) -> float:
        """Seconds for which a client is held back."""
        return min(self._owed(now_s)[0], _HOLD_S[self.quota.of])

    def refuses(self, now_s: float) -> bool:
        """True while it owes more than holding clients back can settle; down to half of that."""
        longest_s = _HOLD_S[self.quota.of] / (2 if self.is_refusing else 1)
        self.is_refusing = self._owed(now_s)[0] > longest_s
        return self.is_refusing

    def refusal(self, now_s: float) -> Refusal:
        """The answers to requests while it refuses."""
        owed_s, limit = self._owed(now_s)
        return Refusal(self, limit, math.ceil(owed_s * 1000))

    def _owed(self, now_s: float) -> tuple[float, str]:
        """Seconds until it owes nothing, and the limit of which it owes most."""
        return max(
            ((bucket.owed_s(now_s), limit) for limit, bucket in self._buckets.items()),
            default=(0.0, ""),
        )


class Refusal(NamedTuple):
    """The reason for refusing requests. wait_ms: until they may be tried again."""

    meter: Meter
    limit: str
    wait_ms: int

    def error(self, code: int) -> RequestError | None:
        """The answer to a request of this code; None for those that are served all the same."""
        if code in _ALWAYS_SERVED or (code in _SERVED_ABOVE_RATES and self.limit in RATES):
            return None
        return self.rejection(code)

    def rejection(self, code: int) -> RequestError:
        """The answer to a request of this code."""
        meter, limit, wait_ms = self
        allowed = shown(limit, getattr(meter.quota, limit))
        return RequestError(
            ResponseCode.FLOW_CONTROL if code in _PULLS else ResponseCode.SYSTEM_BUSY,
            f"[quota] {meter.quota.of} {meter.name}: {allowed}; again in {wait_ms} ms",
            {SLOW_STAGE: QUOTA_STAGE, RETRY_AFTER_MS: str(wait_ms)},
        )


def name_of(channel: Channel) -> str:
    """The user of a client, else its address."""
    return channel.user or channel.signer or channel.ip


class Held(NamedTuple):
    """A client that is held back until a time."""

    until_s: float
    number: int
    channel: ServerChannel


class Metering:
    """The meters of users' quotas, and the clients that are held back.

    held, refused: the number of times by kind and name of the quota.
    registry: refuses requests. now_s: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        table: QuotaTable,
        registry: Registry,
        hold_back: HoldBack,
        now_s: Callable[[], float] = trio.current_time,
    ) -> None:
        self.table, self._registry, self._hold_back = table, registry, hold_back
        self.now_s = now_s
        self.held: Counter[tuple[Of, str]] = Counter()
        self.refused: Counter[tuple[Of, str]] = Counter()
        # Meters of quotas with a name, and of the users that share the common quota's limits.
        self._meters: dict[tuple[Of, str], Meter] = {}
        self._common: Recent[str, Meter] = Recent(is_in_use=lambda meter: bool(meter.channels))
        # Connections of users whose connections are limited.
        self._counted: dict[ServerChannel, Meter] = {}
        # The meters that requests of the read being served have used.
        self._used: set[Meter] = set()
        self._held: list[Held] = []
        self._numbers = counting()
        self._is_holding = trio.Event()

    def forget(self) -> None:
        """Begin anew after a change of quotas; what is owed is forgiven."""
        self._meters.clear()
        self._common.clear()
        self._counted.clear()
        self._used.clear()
        self._release(math.inf)

    def closed(self, channel: ServerChannel) -> None:
        """Count a connection no more."""
        if (meter := self._counted.pop(channel, None)) is not None:
            meter.channels.discard(channel)

    # -- what is taken -----------------------------------------------------------------------------

    def handle(self, channel: ServerChannel, frames: list[Frame], serve: Serve) -> list[Frame]:
        """Serve the frames of a client's read, or refuse them; see ``FrameHandler``."""
        now_s = self.now_s()
        user = self.user(name_of(channel))
        if user is not None and (refusal := self._refusal(user, channel, now_s)) is not None:
            self.refuse(channel, frames, refusal)
            # Answers cost something, too.
            self._used.add(user)
            self._hold(channel, now_s)
            return []
        began = thread_time()
        rest = serve(channel, frames)
        if user is not None:
            user.spend("cpu", thread_time() - began, now_s)
            user.spend("requests", len(frames) - len(rest), now_s)
            user.spend("bytes_in", frame_bytes(frames) - frame_bytes(rest), now_s)
            user.spend("bytes_out", channel.take_sent_bytes(), now_s)
            self._used.add(user)
        if self._used:
            self._hold(channel, now_s)
        return rest

    def refuse(self, channel: ServerChannel, frames: list[Frame], refusal: Refusal) -> None:
        """Answer frames with a refusal; serve those that must be.

        The latter add nothing to what is owed, which keeps the others waiting, but their client is
        held back: so it can't send them without end.
        """
        refused = self._registry.refuse(channel, frames, refusal.error)
        self.refused[refusal.meter.key] += refused
        if refused < len(frames):
            self._used.add(refusal.meter)

    def spend(self, meter: Meter, limit: str, amount: float, now_s: float) -> None:
        """Note what the read that is being served takes."""
        meter.spend(limit, amount, now_s)
        self._used.add(meter)

    # -- meters ------------------------------------------------------------------------------------

    def meter(self, of: Of, name: str) -> Meter | None:
        """The meter of what has a quota of its own."""
        meter = self._meters.get((of, name))
        if meter is None and (quota := self.table.get(of, name)) is not None:
            meter = self._meters[of, name] = Meter(quota, name)
        return meter

    def user(self, name: str) -> Meter | None:
        """The meter of a user, or of an address."""
        meter = self.meter("user", name)
        if meter is None and (common := self.table.get("user", ANY)) is not None:
            meter = self._common.use(name, lambda: Meter(common, name))
        return meter

    def _refusal(self, user: Meter, channel: ServerChannel, now_s: float) -> Refusal | None:
        quota = user.quota
        if quota.counts_channels and channel not in user.channels:
            if quota.connections is not None and len(user.channels) >= quota.connections:
                return Refusal(user, "connections", RETRY_MS)
            self.closed(channel)  # it was another user's before its log-in
            user.channels.add(channel)
            self._counted[channel] = user
        return user.refusal(now_s) if user.refuses(now_s) else None

    # -- clients that are held back ----------------------------------------------------------------

    def _hold(self, channel: ServerChannel, now_s: float) -> None:
        used, self._used = self._used, set()
        longest_s = 0.0
        for meter in used:
            if wait_s := meter.hold_s(now_s):
                self.held[meter.key] += 1
                longest_s = max(longest_s, wait_s)
        if longest_s and channel.is_open:
            self._hold_back(channel, is_held_back=True)
            # All that it sends meanwhile at once would hold up the others.
            channel.read_little()
            heapq.heappush(self._held, Held(now_s + longest_s, next(self._numbers), channel))
            self._is_holding.set()

    async def run(self) -> None:
        """Read clients again whose time is over, until cancelled."""
        while True:
            await self._is_holding.wait()
            while self._held:
                await trio.sleep(min(_TICK_S, max(0.0, self._held[0].until_s - self.now_s())))
                self._release(self.now_s())
            self._is_holding = trio.Event()

    def _release(self, now_s: float) -> None:
        """Read clients again whose time is over."""
        while self._held and self._held[0].until_s <= now_s:
            self._hold_back(heapq.heappop(self._held).channel, is_held_back=False)
