"""Meters of what only a broker has: topics, groups, pulls that wait, and what users own."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.queue_directory import Use
from headrace_daemon.buckets import Recent
from headrace_daemon.quotas.metering import RETRY_MS, Meter, Metering, Refusal, name_of
from headrace_protocol.bodies import HeartbeatData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RemoteProtocolError, RequestError
from headrace_protocol.header_codecs import decode_header
from headrace_protocol.headers import StageSendHeader
from headrace_protocol.quotas import shown
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.rights.wanted import Wanted, wanted
from headrace_protocol.serving import Request, check_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.host_budget import Made
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_broker.quotas.owners import Owners
    from headrace_daemon.quotas.table import QuotaTable
    from headrace_daemon.serving.server import HoldBack, Serve
    from headrace_daemon.serving.server_channel import ServerChannel
    from headrace_protocol.channel import Channel
    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.quotas import Of
    from headrace_protocol.serving import Registry, Reply

# Names to search a request for; decoding its header takes as long as a few dozen searches.
_SEARCHED_MAX: Final = 32
# Of a body that is searched.
_SEARCHED_BYTES_MAX: Final = 16 * 1024
# First bytes of a body that may be JSON, and then have names.
_JSON_BEGINS: Final = b"{ \t\r\n"
# A character of a name, as JSON may have it.
_ESCAPED: Final = re.compile(rb"\\u00[2-7]")
# Frames whose names are looked at before they are served: those that are left over are looked at
# again.
_FRAMES_AT_ONCE: Final = 256

_JOIN: Final = frozenset((Action.SUB,))
_KINDS: Final[dict[Kind, Of]] = {Kind.TOPIC: "topic", Kind.GROUP: "group"}


def _named(request: Request) -> Iterable[Wanted]:
    """The topics and groups that a request is about. Raises as ``wanted`` does."""
    return dict.fromkeys(each for each in wanted(request) if each.kind in _KINDS)


def _of_heartbeat(request: Request) -> Iterable[Wanted]:
    """The groups of a heartbeat, which are judged one by one: it wants nothing as a whole."""
    check_body(request)
    members = HeartbeatData.decode(request.body).consumer_data_set
    return {Wanted(Kind.GROUP, member.group_name, _JOIN) for member in members}


class BrokerMetering(Metering):
    """The meters of all quotas of a broker.

    lookups_changed: has sends look up their queues again, after which ``find_place`` can refuse
    them. owners: what users have made.
    """

    def __init__(
        self,
        table: QuotaTable,
        registry: Registry,
        hold_back: HoldBack,
        lookups_changed: Callable[[], None],
        long_polling: LongPolling,
        owners: Owners,
    ) -> None:
        super().__init__(table, registry, hold_back)
        self._lookups_changed, self._long_polling = lookups_changed, long_polling
        self._owners = owners
        # The staged queries of each user, where they are limited.
        self._queries: Recent[str, set[str]] = Recent()
        # Topics and groups with limits of what their requests take.
        self._named: tuple[bytes, ...] = ()
        # Requests to be counted for them after a read, less those that were refused for want of
        # rights: at once, or once they had waited.
        self._asked: Counter[Meter] = Counter()

    def forget(self) -> None:
        """See Metering."""
        super().forget()
        self._asked.clear()
        self._named = tuple(
            quota.name.encode()
            for quota in self.table.all()
            if quota.of != "user" and not {"requests", "cpu"}.isdisjoint(quota.limits)
        )
        self._lookups_changed()

    # -- messages ----------------------------------------------------------------------------------

    def put(self, topic: str, body_bytes: int) -> None:
        """Note that messages were stored in a topic."""
        self._moved("topic", topic, "bytes_in", body_bytes)

    def get(self, group: str, topic: str, body_bytes: int) -> None:
        """Note that a group has read messages of a topic."""
        self._moved("topic", topic, "bytes_out", body_bytes)
        self._moved("group", group, "bytes_out", body_bytes)

    def _moved(self, of: Of, name: str, limit: str, body_bytes: int) -> None:
        if (meter := self.meter(of, name)) is None:
            return
        now_s = self.now_s()
        was_refusing = meter.is_refusing
        self.spend(meter, limit, body_bytes, now_s)
        if of == "topic" and meter.refuses(now_s) and not was_refusing:
            self._lookups_changed()

    def find_place(self, _directory: QueueDirectory, lookup: Lookup) -> None:
        """Raise RequestError for sends to a topic whose quota owes too much; a ``FindPlace``."""
        if lookup.use is not Use.SEND:
            return
        meter, now_s = self.meter("topic", lookup.topic.topic_name), self.now_s()
        if meter is not None and meter.refuses(now_s):
            self.refused[meter.key] += 1
            raise meter.refusal(now_s).rejection(RequestCode.SEND_MESSAGE_V2)

    # -- requests that name a topic or a group -----------------------------------------------------

    def handle(self, channel: ServerChannel, frames: list[Frame], serve: Serve) -> list[Frame]:
        """See Metering."""
        return super().handle(
            channel, frames, partial(self._serve, serve) if self._named else serve
        )

    def _serve(self, serve: Serve, channel: ServerChannel, frames: list[Frame]) -> list[Frame]:
        """Serve the first frames; those of topics and groups that owe too much are refused.

        Those that want rights cost them nothing. The time for all is divided among them, since they
        are served together.
        """
        now_s = self.now_s()
        served: list[Frame] = []
        meters: list[list[Meter]] = []
        for frame in frames[:_FRAMES_AT_ONCE]:
            named = self._meters_of(channel, frame)
            refusing = [meter for meter in named if meter.refuses(now_s)]
            if refusing:
                self.refuse(channel, [frame], refusing[0].refusal(now_s))
            else:
                served.append(frame)
                meters.append(named)
        began = thread_time()
        rest = serve(channel, served)
        each_s = (thread_time() - began) / max(1, len(served) - len(rest))
        for named in meters[: len(served) - len(rest)]:
            self._asked.update(named)
        self._charge(each_s, now_s)
        return rest + frames[_FRAMES_AT_ONCE:]

    def _charge(self, each_s: float, now_s: float) -> None:
        """Note what was asked since the last read. each_s: time for a request."""
        asked, self._asked = self._asked, Counter()
        for meter, count in asked.items():
            if count > 0:
                self.spend(meter, "requests", count, now_s)
                self.spend(meter, "cpu", count * each_s, now_s)
            else:  # counted before they waited
                meter.spend("requests", count, now_s)

    def _give_back(self, request: Request, reply: Reply) -> None:
        """Count a request less for the topics and groups to which it wants rights."""
        if not self._named or reply.code != ResponseCode.NO_PERMISSION:
            return
        with suppress(RequestError, msgspec.MsgspecError):
            is_unknown = request.subject is None
            refused = {
                self.meter(_KINDS[want.kind], want.name)
                for want in _named(request)
                if is_unknown or not request.may(want.kind, want.name, *want.actions)
            }
            self._asked.subtract(meter for meter in refused if meter is not None)

    def _count_heartbeat(self, request: Request) -> None:
        """Count a heartbeat for the groups that its client may join; a ``Guard`` after rights.

        It is served whatever they owe, and then adds nothing to that.
        """
        if not self._named or not self._may_name(b"", request.body):
            return
        now_s = self.now_s()
        for want in _of_heartbeat(request):
            meter = self.meter("group", want.name)
            if meter is None or not request.may(want.kind, want.name, *want.actions):
                continue
            self._used.add(meter)
            self._asked[meter] += not meter.refuses(now_s)

    def _meters_of(self, channel: ServerChannel, frame: Frame) -> list[Meter]:
        """The meters of the topics and groups that a request names."""
        serialize_type, header, body = frame
        header = bytes(header)
        if not self._may_name(header, body):
            return []
        try:
            command = decode_header(serialize_type, header)
            named = _named(Request(channel, serialize_type, command, body, len(header)))
        except (RemoteProtocolError, RequestError, msgspec.MsgspecError, ValueError):
            return []  # whoever serves it finds it malformed
        meters = dict.fromkeys(self.meter(_KINDS[each.kind], each.name) for each in named)
        return [meter for meter in meters if meter is not None]

    def _may_name(self, header: bytes, body: Buffer) -> bool:
        """False if neither header nor body names a topic or a group with limits."""
        named, text = self._named, header
        if body and body[0] in _JSON_BEGINS:
            text += bytes(body[:_SEARCHED_BYTES_MAX])
        return (
            len(named) > _SEARCHED_MAX
            or any(map(text.__contains__, named))
            or _ESCAPED.search(text) is not None
            or (text is not header and len(body) > _SEARCHED_BYTES_MAX)
        )

    # -- what users have at a time -----------------------------------------------------------------

    def check_hold(self, channel: Channel) -> None:
        """Raise RequestError if the user of a channel has too many held pulls."""
        user = self.user(name_of(channel))
        most = None if user is None else user.quota.held_pulls
        if user is not None and most is not None:
            count = sum(map(self._long_polling.held_by, user.channels))
            if count >= most:
                self.refused[user.key] += 1
                raise Refusal(user, "held_pulls", RETRY_MS).rejection(RequestCode.PULL_MESSAGE)

    def check_owned(self, owner: str, what: Made, more: int) -> None:
        """Raise RequestError if a user would have too many topics or groups."""
        user = self.user(owner)
        most = None if user is None else getattr(user.quota, what)
        if user is not None and most is not None and self._owners.count(owner, what) + more > most:
            self.refused[user.key] += 1
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"[quota] user {owner}: {shown(what, most)} at this broker; delete some, or have "
                "the quota raised",
            )

    def guard(self, registry: Registry, *, has_rights: bool) -> None:
        """Have staged writes checked and heartbeats counted, once their rights are judged.

        has_rights: whether requests may be refused for want of rights.
        """
        registry.guard(self._check_staged, {RequestCode.STAGE_SEND})
        registry.guard(self._count_heartbeat, {RequestCode.HEART_BEAT})
        if has_rights:
            registry.on_refused.append(self._give_back)

    def _check_staged(self, request: Request) -> None:
        """Raise RequestError if a user would have too many bytes staged; a ``Guard``."""
        name = name_of(request.channel)
        user = self.user(name)
        most = None if user is None else user.quota.staged_bytes
        if user is None or most is None:
            return
        query_id = request.header(StageSendHeader).query_id
        queries = self._queries.use(name, set)
        queries.add(query_id)
        staged = {each: self._owners.staged_bytes(each) for each in queries}
        queries.intersection_update({query_id, *(each for each in queries if staged[each])})
        if sum(staged.values()) + len(request.body) > most:
            self.refused[user.key] += 1
            raise Refusal(user, "staged_bytes", RETRY_MS).rejection(RequestCode.STAGE_SEND)
