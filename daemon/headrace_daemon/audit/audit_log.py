"""The events of a daemon, recorded in its audit log.

The loop encodes an event and puts it into a queue; a thread writes it. Nothing here is on the way
of a message: events are administration, denials, log-ins, registrations, settings, certificates,
and the start and stop of the daemon. Texts of clients are bounded and escaped, and no secrets.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
import trio

from headrace_daemon.audit.lines import LOST, Event, encode
from headrace_daemon.audit.log_file import LogFile
from headrace_daemon.audit.repeats import Repeats
from headrace_daemon.command import clean
from headrace_daemon.line_queue import LineQueue
from headrace_protocol import __version__
from headrace_protocol.codes import RequestCode, ResponseCode, code_name
from headrace_protocol.errors import RequestError, reason_of
from headrace_protocol.outages import Outages
from headrace_protocol.rights.signature import ACCESS_KEY
from headrace_protocol.rights.wanted import is_administrative, wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace_daemon.audit.settings import AuditSettings
    from headrace_daemon.serving.server import RemotingServer
    from headrace_protocol.channel import Channel
    from headrace_protocol.serving import Registry, Reply, Request

log = structlog.get_logger("headrace.audit")

# Brokers repeat them; ``broker_changed`` records what they change.
_OF_BROKERS: Final = frozenset(
    (RequestCode.REGISTER_BROKER, RequestCode.UNREGISTER_BROKER, RequestCode.BROKER_HEARTBEAT)
)
RECORDED: Final = frozenset(filter(is_administrative, RequestCode)) - _OF_BROKERS
_LOG_IN: Final = RequestCode.AUTH_SESSION
REPEAT_S: Final = 1.0
_RETRY_S: Final = 1.0
_STOP_S: Final = 5.0
_TEXT_CHARS_MAX: Final = 256
_RESOURCES_MAX: Final = 16
# Fields of headers that are shown.
_SHOWN: Final = (
    "topic",
    "perm",
    "readQueueNums",
    "writeQueueNums",
    "group",
    "groupName",
    "timestamp",
    "msgId",
    "brokerName",
    "namespace",
    "key",
    "username",
    "subject",
    "policyType",
    "resource",
)
# Requests whose bodies are shown: they say what is changed, and have no secret.
_SHOWN_BODIES: Final = frozenset(
    (RequestCode.AUTH_CREATE_ACL, RequestCode.AUTH_UPDATE_ACL, RequestCode.SET_QUOTA)
)
_BODY_CHARS_MAX: Final = 1024
# Resources of a denied request are read from its body only up to this size.
_BODY_BYTES_MAX: Final = 64 * 1024


class AuditLog:
    """Records events."""

    def __init__(
        self, daemon: str, settings: AuditSettings, now_s: Callable[[], float] = time.time
    ) -> None:
        """daemon: kind and name. now_s: Unix time."""
        self._failure = ""
        self._daemon = daemon
        self._settings = settings
        # As the daemon's own log names it.
        self._name = f"audit log {settings.path}"
        self._now_s = now_s
        self._file = LogFile(settings, self._of_log)
        self._queue = LineQueue("audit log", self._write)
        self._repeats = Repeats(self._now)
        self._outages = Outages(log.warning)
        # Lost lines that a line of the log names.
        self._named_count = 0

    @property
    def problem(self) -> str:
        """Why events can't be recorded at present; empty if they can."""
        return self._failure or ("it is written too slowly" if self._queue.is_full else "")

    @property
    def dropped_count(self) -> int:
        """Lines that could not be written."""
        return self._queue.dropped_count

    @property
    def failing_s(self) -> float:
        """Seconds for which nothing could be written."""
        return self._outages.seconds(self._name)

    def runtime_info(self) -> dict[str, str]:
        """For GET_BROKER_RUNTIME_INFO."""
        problem = self.problem
        return {"auditProblem": f"{self._settings.path}: {problem}" if problem else ""}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled; started once the file is open. Raises OSError with a remedy."""
        await trio.to_thread.run_sync(self._file.open)
        self._queue.start()
        self._record("daemon.started", detail={"version": __version__})
        task_status.started()
        try:
            while True:
                await trio.sleep(REPEAT_S)
                self._record_repeats()
        finally:
            self._record_repeats()
            self._record("daemon.stopped")
            with trio.CancelScope(shield=True):
                if await trio.to_thread.run_sync(self._queue.close, _STOP_S):
                    self._file.close()

    # -- events ------------------------------------------------------------------------------------

    def watch(self, registry: Registry, server: RemotingServer) -> None:
        """Record administrative requests, denials and certificates.

        Before all other guards, so that it records what they refuse.
        """
        registry.guard(self._begin, RECORDED)
        registry.on_refused.append(self._refused)
        server.on_certificate = self._certificate_read
        server.on_log_in = self.authenticated

    def restrict(self, registry: Registry) -> None:
        """Refuse administration that can't be recorded, if a setting says so.

        After all other guards, since the reason is for administrators alone.
        """
        if self._settings.refuses:
            registry.guard(self._check, RECORDED)

    def authenticated(self, channel: Channel, user: str, is_accepted: bool) -> None:
        """A client has logged in, or failed to: once for each log-in, not for each request."""
        event = "login" if is_accepted else "login.failed"
        host, name = channel.ip, bounded(user)
        self._repeat(event, host, (name, host), user=name, address=channel.address)

    def broker_changed(self, event: str, channel: Channel, broker: str, address: str) -> None:
        """event: a broker was "registered", "unregistered" or "lost". address: its own."""
        detail = {"broker": bounded(broker), "address": bounded(address)}
        self._repeat(
            f"broker.{event}",
            channel.ip,
            (channel.address, *detail.values()),
            user=bounded(channel.user) if channel.user else None,
            address=channel.address,
            detail=detail,
        )

    def settings_changed(self, request: Request, changes: Mapping[str, tuple[str, str]]) -> None:
        """Settings were changed. changes: old and new value by key, without secrets."""
        for key, (old, new) in changes.items():
            self._record(
                "setting.changed",
                **_sender(request),
                detail={"setting": key, "old": bounded(old), "new": bounded(new)},
            )

    def _certificate_read(self, file: str, problem: str) -> None:
        detail = {"file": file} | ({"reason": bounded(problem)} if problem else {})
        self._record(f"certificate.{'rejected' if problem else 'changed'}", detail=detail)

    def _begin(self, request: Request) -> None:
        """Guard of administrative requests: their answers are recorded."""
        request.on_reply = self._answered

    def _check(self, request: Request) -> None:
        if problem := self.problem:
            request.on_reply = None
            raise RequestError(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                f"{code_name(request.command.code)} is refused, since it can't be recorded in "
                f"auditLogPath={self._settings.path}: {problem}; mend that, or set "
                "auditOnFailure=drop and restart the daemon",
            )

    def _answered(self, request: Request, reply: Reply) -> None:
        self._record("request", **_described(request, reply))

    def _refused(self, request: Request, reply: Reply) -> None:
        is_recorded = request.on_reply is not None or request.command.code == _LOG_IN
        if reply.code != ResponseCode.NO_PERMISSION or is_recorded:
            return
        host = request.channel.ip
        what = _user(request) or host, bounded(reply.remark or "")
        self._repeats.add("denied", host, what, partial(_denied, request, reply))

    # -- the queue ---------------------------------------------------------------------------------

    def _repeat(self, event: str, host: str, what: tuple[str, ...], **fields: Any) -> None:
        self._repeats.add(event, host, what, lambda: fields)

    def _record_repeats(self) -> None:
        for event, fields in self._repeats.take():
            self._record(event, **fields)

    def _record(self, event: str, **fields: Any) -> None:
        self._queue.put(self._encoded(event, **fields))

    def _encoded(self, event: str, **fields: Any) -> bytes:
        return encode(Event(time=self._now(), daemon=self._daemon, event=event, **fields))

    def _now(self) -> str:
        now = datetime.fromtimestamp(self._now_s(), UTC).replace(tzinfo=None)
        return f"{now.isoformat(timespec='milliseconds')}Z"

    def _of_log(self, event: str, detail: dict[str, object]) -> bytes:
        return self._encoded(event, detail=detail)

    # -- in the thread -----------------------------------------------------------------------------

    def _write(self, lines: list[bytes]) -> int:
        """Write lines, or retry until the daemon stops; returns how many are lost then."""
        events = deque(lines)
        if lost_count := self._queue.dropped_count - self._named_count:
            events.append(self._of_log(LOST, {"count": lost_count}))
            self._named_count += lost_count
        while True:
            try:
                self._file.append(events)
            except OSError as error:
                self._failure = reason_of(error)
                self._outages.failed(self._name, self._failure)
                if self._queue.is_closed.wait(_RETRY_S):
                    return len(events)
            else:
                self._failure = ""
                self._outages.worked(self._name)
                return 0


def bounded(text: str, chars_max: int = _TEXT_CHARS_MAX) -> str:
    """A text of a client, cut and without control characters."""
    return clean(text[:chars_max]) + ("..." if len(text) > chars_max else "")


def _described(request: Request, reply: Reply) -> dict[str, Any]:
    """The fields of a request that was answered."""
    code = request.command.code
    detail = _named(request)
    if reply.code and reply.remark:
        detail["remark"] = bounded(reply.remark)
    return {
        **_sender(request),
        "request": code_name(code),
        "code": code,
        "resources": tuple(_resources(request)),
        "outcome": _outcome(reply.code),
        "detail": detail,
    }


def _denied(request: Request, reply: Reply) -> dict[str, Any]:
    """The same of a denied one, with the user that it claims to be from."""
    fields = _described(request, reply)
    if not fields["user"] and (claimed := _fields(request).get(ACCESS_KEY)):
        fields["detail"]["claimedUser"] = bounded(claimed)
    return fields


def _named(request: Request) -> dict[str, str]:
    """The parts of a request that say what is to be changed, none of which is a secret."""
    fields = _fields(request)
    named: dict[str, str] = {name: bounded(fields[name]) for name in _SHOWN if name in fields}
    if request.command.code in _SHOWN_BODIES:
        body = str(request.body[: 4 * _BODY_CHARS_MAX], "utf-8", "replace")
        named["body"] = bounded(body, _BODY_CHARS_MAX)
    return named


def _fields(request: Request) -> dict[str, str]:
    try:
        return request.command.ext()
    except msgspec.ValidationError:
        return {}


def _sender(request: Request) -> dict[str, Any]:
    return {"user": _user(request), "address": request.channel.address}


def _user(request: Request) -> str | None:
    user = request.subject.user if request.subject is not None else request.channel.user
    return bounded(user) if user else None


def _resources(request: Request) -> Iterator[str]:
    if len(request.body) > _BODY_BYTES_MAX:
        return
    try:
        for each in islice(wanted(request), _RESOURCES_MAX):
            yield bounded(f"{each.kind.value}:{each.name}" if each.name else each.kind.value)
    except (RequestError, ValueError):
        return  # malformed: the remark says why


def _outcome(code: int) -> str:
    return ResponseCode(code).name if code in _RESPONSE_CODES else str(code)


_RESPONSE_CODES = frozenset(ResponseCode)
