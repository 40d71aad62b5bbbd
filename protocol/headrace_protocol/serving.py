"""The protocol's server side without sockets: maps request codes to functions, errors to codes.

Both daemons use it; headrace_daemon.serving moves the bytes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from headrace_protocol import fastjson
from headrace_protocol.at_once import fetch_at_once, reject_answer, run_at_once, serve_at_once
from headrace_protocol.bounds import OutOfBounds, body_of, check_size
from headrace_protocol.codes import RequestCode, ResponseCode, code_name
from headrace_protocol.command import FLAG_RESPONSE, Command, header_fields
from headrace_protocol.errors import (
    LocalProtocolError,
    NotReady,
    RequestError,
)
from headrace_protocol.header_codecs import (
    HEADRACE_MARK,
    decode_header,
    encode_frame,
    notice,
)
from headrace_protocol.waiting import Effect, Run, State
from headrace_protocol.waits import Waits

if TYPE_CHECKING:
    from headrace_protocol.channel import Channel
    from headrace_protocol.frame import Buffer, Frame
    from headrace_protocol.rights.rules import Action, Kind
    from headrace_protocol.subject import Rights, Subject

Header = TypeVar("Header", bound=msgspec.Struct)

_SLOW_S = 0.005
# Duration of a slice of a request that waits, which delays the requests of all clients.
SLICE_S = 0.002
# Time for one client's requests before a daemon serves the others.
TURN_S = 0.005
# A body up to this size is within every bound.
_SMALL_BYTES = fastjson.PARSED_BYTES_MAX
# A larger body, longer than any read, is the first of its read; its guard may use a thread.
LARGE_BODY_BYTES = 1024 * 1024
# Requests that may wait for a message as long as their client likes.
_LONG_POLLS = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.BULK_PULL,
        RequestCode.POP_MESSAGE,
        RequestCode.NOTIFICATION,
    }
)
# Memory of a waiting request besides its bytes, as measured (docs/benchmarks/growth.md).
_WAITING_BYTES = 2048


class Reply(msgspec.Struct, gc=False):
    """An answer on its way out.

    header: its fields by their names on the wire, or a struct of them.
    body: buffers, sent in order without being joined or copied.
    on_lost: called if the client is closed before it was sent all of the answer.
    """

    header: msgspec.Struct | Mapping[str, object] | None = None
    body: tuple[Buffer, ...] = ()
    code: int = ResponseCode.SUCCESS
    remark: str | None = None
    on_lost: Callable[[], None] | None = None


class Request(msgspec.Struct):
    """One request with its channel.

    header_bytes: size of the header as received.
    waits: see ``Registry.note_wait``.
    on_reply: called with the request and its answer, which leaves afterwards.
    subject: who makes it, as the guard has found; None where nobody is checked. rights: decides
    what the subject may do; None if that is everything.
    is_signed: whether its signature is valid, where a thread has found that out.

    Not gc=False: a held request and its channel's owner refer to each other.
    """

    channel: Channel
    serialize_type: int
    command: Command
    body: Buffer
    header_bytes: int
    waits: Waits | None = None
    subject: Subject | None = None
    on_reply: Callable[[Request, Reply], None] | None = None
    rights: Rights | None = None
    is_signed: bool | None = None

    def may(self, kind: Kind, name: str, *actions: Action) -> bool:
        """True if its client has one of the actions on a resource."""
        subject, rights = self.subject, self.rights
        return subject is None or rights is None or rights.may(subject, kind, name, *actions)

    def may_create(self, kind: Kind, name: str) -> bool:
        """True if a topic or group may be made for its client."""
        subject, rights = self.subject, self.rights
        return subject is None or rights is None or rights.may_create(subject, kind, name)

    def check(self, kind: Kind, name: str, *actions: Action) -> None:
        """Raise RequestError unless ``may``."""
        if self.subject is not None and self.rights is not None:
            self.rights.require(self.subject, kind, name, *actions)

    @property
    def held_bytes(self) -> int:
        """Memory of the request while it waits, to be charged to its client."""
        body = self.body
        # A view keeps the whole buffer alive.
        body_bytes = memoryview(body.obj).nbytes if isinstance(body, memoryview) else len(body)
        return _WAITING_BYTES + self.header_bytes + body_bytes

    def header(self, header_type: type[Header]) -> Header:
        """The extension fields; see ``Command.header``."""
        return self.command.header(header_type)

    def reply(self, reply: Reply) -> None:
        """Answer in the codec of the request; a one-way request gets no answer."""
        command = self.command
        if self.waits is not None:
            self.waits.end()
        if self.on_reply is not None:
            self.on_reply(self, reply)
        if command.is_oneway:
            if reply.on_lost is not None:
                reply.on_lost()
            return
        frame = encode_frame(
            self.serialize_type,
            reply.code,
            command.opaque,
            flag=FLAG_RESPONSE,
            fields=header_fields(reply.header),
            remark=reply.remark,
            body_bytes=sum(map(len, reply.body)),
        )
        self.channel.write(frame, *reply.body)
        if reply.on_lost is not None:
            self.channel.when_lost(reply.on_lost)


class ServedElsewhere(RequestError):
    """A request that another daemon serves.

    serve: the rest of the request. Where it can't be passed on, this is a rejection like any other.
    """

    def __init__(self, code: int, remark: str, serve: Callable[[Request], Work]) -> None:
        super().__init__(code, remark)
        self.serve = serve


# The rest of a request that can't be answered at once; see ``waiting``.
Work = Coroutine[Effect, Any, "Reply | None"]
# Returns the answer, None if it has answered itself or holds the request to answer later, or the
# rest of the request: it may be an ``async`` function.
# May raise RequestError, and ServedElsewhere to pass the request on.
RequestFunction = Callable[[Request], "Reply | Work | None"]
LongFunction = Callable[[Request], Work]
# Returns None to accept a request, or what its function would return, which is not called then.
# May raise NotReady for a body over LARGE_BODY_BYTES: the client's further requests wait, too.
Guard = RequestFunction
# Called after a fetch, with its error or None.
Then = Callable[[Exception | None], None]
# Runs the fetch of a client's request, then calls back.
RunFetch = Callable[["Channel", NotReady, Then], None]
# Runs a step of a client's request outside of ``Registry.handle``.
InTurn = Callable[["Channel", Callable[[], object]], None]
# Serves several frames of one client; passes those that need more to ``Registry.serve``.
ReadyFunction = Callable[["Channel", "list[Frame]"], None]
# Runs work in slices.
RunLong = Callable[[Iterator[None]], None]
# Where a request is refused: by a guard, for its body, or while it is served.
Stage = Literal["guard", "body", "request"]
# Handles a client's answer to a request of the daemon; False if the daemon sent no such request.
Answered = Callable[["Channel", Command, "Buffer"], bool]
OnLate = Callable[["Request", Mapping[str, float]], None]


class Registry:
    """Request codes and the functions that serve them.

    unexpected: called with the request and its exception, for exceptions of other types than
    those with a response code.
    run_long: runs long work. run_fetch: runs fetches, which wait for the disk.
    in_turn: runs a step of a request that has waited, in a turn of the server.
    on_slow: called after a slow request with the name of its code and its seconds.
    on_late: called with a request whose answer took over ``late_s``, and with the seconds by what
    it waited for. Pulls may wait for messages.
    turn_s: longest time for one client in ``handle``.
    answered: handles clients' answers to requests of the daemon.
    on_refused: each is called with every refused request and its answer.
    refusals: number of refused requests by stage and response code.
    """

    def __init__(
        self,
        unexpected: Callable[[Request, Exception], None],
        *,
        run_long: RunLong = run_at_once,
        run_fetch: RunFetch = fetch_at_once,
        in_turn: InTurn = serve_at_once,
        turn_s: float = math.inf,
        answered: Answered = reject_answer,
        on_slow: Callable[[str, float], None] = lambda _name, _seconds: None,
        late_s: float = 1.0,
        on_late: OnLate = lambda _request, _seconds: None,
    ) -> None:
        self.functions: dict[int, RequestFunction] = {}
        self._unexpected = unexpected
        self.refusals: Counter[tuple[Stage, int]] = Counter()
        self.run_long = run_long
        self.run_fetch = run_fetch
        self.in_turn = in_turn
        self.turn_s = turn_s
        self.slice_s = SLICE_S
        self.on_slow = on_slow
        self._late_s = late_s
        self._on_late = on_late
        self.on_refused: list[Callable[[Request, Reply], None]] = []
        self.answered = answered
        # Requests whose functions are coroutines, until their ends.
        self.running: set[Run] = set()
        # Unfinished long requests of each client, the running one first.
        self._long: dict[Channel, deque[Run]] = {}
        # Clients with a request for which a guard waits.
        self._held_up: set[Channel] = set()
        self._guards: dict[int, tuple[Guard, ...]] = {}
        self._closed: set[int] = set()
        self._ready_code = 0
        self._ready_start = b""
        self._ready_function: ReadyFunction | None = None

    def route(self, code: RequestCode, function: RequestFunction) -> None:
        """Route ``code`` to ``function``; it must have a row in ``bounds.BODIES``."""
        assert code not in self.functions, code
        self.functions[code] = function

    def route_long(self, code: RequestCode, function: LongFunction) -> None:
        """Route ``code`` to ``function`` in slices, because its work grows with a table."""
        self.route(code, functools.partial(self.begin_long, function))

    def route_ready(self, code: RequestCode, function: ReadyFunction) -> None:
        """Route several requests of ``code`` at a time to ``function``, unless it has a guard.

        This applies to JSON headers that begin with the code, as all clients write them: the peer
        sorts its keys.
        """
        self._ready_code = code
        self._ready_start = b'{"code":%d,' % code
        self._ready_function = None if code in self._closed else function

    def guard(
        self,
        guard: Guard,
        codes: Collection[RequestCode] = frozenset(RequestCode),
        *,
        but_ready: bool = False,
    ) -> None:
        """Call ``guard`` before each routed request of ``codes``.

        If it returns something or raises, the request is served by that. It sees each request by
        itself, so ``route_ready`` no longer applies to these codes; and once, but for ``admit``.
        but_ready: whether ``route_ready`` applies all the same, because its function admits only
        what the guard has admitted before.
        """
        for code in codes:
            self._guards[code] = (*self._guards.get(code, ()), guard)
        if but_ready:
            return
        self._closed.update(codes)
        if self._ready_code in self._closed:
            self._ready_function = None

    def handle(self, channel: Channel, frames: list[Frame]) -> list[Frame]:
        """Serve the frames of one client's read; every request is answered, one-way or held.

        Returns the frames for which ``turn_s`` did not suffice: pass them again later.
        Raises RemoteProtocolError for an unreadable header: close the channel then.
        """
        function = self._ready_function
        end = perf_counter() + self.turn_s
        is_large = frames and len(frames[0][2]) > LARGE_BODY_BYTES
        if function is None or not channel.is_greeted or is_large or channel in self._held_up:
            return self._serve_each(channel, frames, end)
        start, start_bytes = self._ready_start, len(self._ready_start)
        ready: list[Frame] = []
        for number, frame in enumerate(frames, 1):
            if frame[1][:start_bytes] == start and not frame[0]:
                ready.append(frame)
                continue
            if ready:
                function(channel, ready)
                ready = []
            if self.serve(channel, frame) >= end:
                return frames[number:]
        if ready:
            function(channel, ready)
        return []

    def _serve_each(self, channel: Channel, frames: list[Frame], end: float) -> list[Frame]:
        if channel in self._held_up:
            return frames
        for number, frame in enumerate(frames, 1):
            if self.serve(channel, frame) >= end:
                return frames[number:]
        return []

    def serve(self, channel: Channel, frame: Frame) -> float:
        """Serve one frame; returns the time afterwards, or 0 for an ignored frame.

        It is infinite if the client's next frame must wait until this one is served.
        Raises RemoteProtocolError as ``handle`` does.
        """
        serialize_type, header, body = frame
        command = decode_header(serialize_type, header)
        if command.is_response:
            return perf_counter() if self.answered(channel, command, body) else 0.0
        if not channel.is_greeted:
            _greet(channel, command)
        request = Request(channel, serialize_type, command, body, len(header))
        if command.code in self._guards and self._is_refused(request):
            return math.inf if channel in self._held_up else perf_counter()
        if len(body) > _SMALL_BYTES and not self._has_good_body(request):
            return perf_counter()
        return self.serve_request(request)

    def refuse(
        self, channel: Channel, frames: list[Frame], error: Callable[[int], RequestError | None]
    ) -> int:
        """Answer frames with the error for their codes, in place of serving them.

        Frames without an error are served. Returns the number of those refused.
        Raises RemoteProtocolError as ``handle`` does.
        """
        refused = 0
        for frame in frames:
            serialize_type, header, body = frame
            command = decode_header(serialize_type, header)
            problem = None if command.is_response else error(command.code)
            if problem is None:
                self.serve(channel, frame)
                continue
            if not channel.is_greeted:
                _greet(channel, command)
            request = Request(channel, serialize_type, command, body, len(header))
            self._send(request, self._refuse("guard", request, problem))
            refused += 1
        return refused

    def _is_refused(self, request: Request) -> bool:
        """True if a guard rejects the request, or takes it over; sends the answer if so."""
        code = request.command.code
        if code not in self.functions:
            return False
        reply = None
        try:
            for guard in self._guards[code]:
                if (reply := guard(request)) is not None:
                    break
        except NotReady as away:
            self._held_up.add(request.channel)
            self.start(request, self._admit_after(away, request))
            return True
        except Exception as error:  # noqa: BLE001 - as in serve_request
            self._fail("guard", request, error)
            return True
        if isinstance(reply, Reply):
            self._note_refusal("guard", request, reply)
        self._answer(request, reply)
        return reply is not None

    def _has_good_body(self, request: Request) -> bool:
        """True if a large body is within its bounds; sends an error if not."""
        try:
            check_body(request)
        except (OutOfBounds, fastjson.MalformedJson) as error:
            self._send(request, self._refuse("body", request, error))
            return False
        return True

    def fail(self, request: Request, error: Exception) -> None:
        """Answer a held request with an error, or pass it on."""
        self._fail("request", request, error)

    def _fail(self, stage: Stage, request: Request, error: Exception) -> None:
        if isinstance(error, ServedElsewhere):
            self.start(request, error.serve(request))
        else:
            self._send(request, self._refuse(stage, request, error))

    def _answer(self, request: Request, reply: Reply | Work | None) -> None:
        if isinstance(reply, Reply):
            self._send(request, reply)
        elif reply is not None:
            self.start(request, reply)

    def serve_request(self, request: Request) -> float:
        """Serve a request that has passed the guards; returns the time afterwards."""
        began = perf_counter()
        code = request.command.code
        try:
            reply = self.functions.get(code, _unknown)(request)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the daemon
            reply = None
            self.fail(request, error)
        if reply is not None:
            self._answer(request, reply)
        elif request.waits is None and code not in _LONG_POLLS:
            self.note_wait(request, _UNKNOWN)
        now = perf_counter()
        if now - began > _SLOW_S:
            self.on_slow(code_name(code), now - began)
            if request.waits is None:
                self._answered_after(request, {"its own work": now - began})
        return now

    def note_wait(self, request: Request, what: str) -> None:
        """Note that a request waits for ``what`` from now on."""
        if request.waits is None:
            request.waits = Waits(what, functools.partial(self._answered_after, request))
        else:
            request.waits.turn_to(what)

    def _answered_after(self, request: Request, waited_s: Mapping[str, float]) -> None:
        if sum(waited_s.values()) > self._late_s:
            self._on_late(request, waited_s)

    def admit(self, request: Request) -> None:
        """Serve a request from its guards on; in a turn.

        A guard may have taken it over; its function alone would not do what the guard does.
        """
        if request.command.code not in self._guards or not self._is_refused(request):
            self.serve_request(request)

    async def _admit_after(self, away: NotReady, request: Request) -> None:
        try:
            await away
        finally:
            self._held_up.discard(request.channel)
        self.admit(request)

    # -- requests that wait ------------------------------------------------------------------------

    def start(self, request: Request, work: Work) -> None:
        """Run the rest of a request, in this turn up to its first wait."""
        run = Run(self, request, lambda: work)
        self.running.add(run)
        run.step()
        if run.state is State.READY:
            self.run_long(run.slices())

    def begin_long(self, function: LongFunction, request: Request) -> None:
        """Serve a request with ``function`` in slices, after the client's other long requests."""
        run = Run(self, request, functools.partial(function, request), is_long=True)
        self.running.add(run)
        run.hold()
        channel = request.channel
        self.note_wait(request, "its turn")
        waiting = self._long.setdefault(channel, deque())
        waiting.append(run)
        # One at a time, since each unfinished answer takes memory.
        if len(waiting) == 1:
            self.run_long(self._serve_long(channel))

    def _serve_long(self, channel: Channel) -> Iterator[None]:
        """Serve the client's long requests in order until one must wait.

        It may wait for another part, or for the client to read its answers.
        """
        waiting = self._long[channel]
        while waiting:
            run = waiting[0]
            if channel.is_open and channel.is_slow:
                channel.on_drained = functools.partial(self.resumed, run)
                self.note_wait(run.request, "the client's reads")
                return
            # A closed client needs no answer, but a change that has begun must not stop halfway.
            if channel.is_open or run.is_begun:
                yield from run.slices()
                if run.state is State.WAITING:
                    return
            else:
                self._forget(run)
            waiting.popleft()
            if waiting:
                yield
        del self._long[channel]

    def resumed(self, run: Run) -> None:
        """Continue a run whose wait is over."""
        if run.is_long:
            self.run_long(self._serve_long(run.request.channel))
            return
        self.in_turn(run.request.channel, run.step)
        if run.state is State.READY:
            self.run_long(run.slices())

    def ended(self, run: Run, reply: Reply | None, error: Exception | None) -> None:
        """Answer the request of a run that has ended."""
        request = run.request
        self._forget(run)
        if error is not None:
            self.fail(request, error)
        elif reply is not None:
            self._send(request, reply)
        elif request.command.code in _LONG_POLLS:
            request.waits = None  # from now on it waits for messages
        else:
            self.note_wait(request, _UNKNOWN)

    def _forget(self, run: Run) -> None:
        self.running.discard(run)
        run.release()

    def waiting(self) -> Counter[str]:
        """The number of requests that wait, by what they wait for."""
        return Counter(run.waits_for for run in self.running if run.waits_for)

    def _send(self, request: Request, reply: Reply) -> None:
        try:
            request.reply(reply)
        except LocalProtocolError as error:
            request.reply(Reply(code=ResponseCode.SYSTEM_ERROR, remark=f"the answer: {error}"))
        except Exception as error:  # noqa: BLE001 - a held request has no other handler
            self._unexpected(request, error)
            remark = "the answer can't be encoded (see the log of this daemon)"
            request.reply(Reply(code=ResponseCode.SYSTEM_ERROR, remark=remark))

    def _refuse(self, stage: Stage, request: Request, error: Exception) -> Reply:
        """The reply for an error, which is counted."""
        reply = self._failed(request, error)
        self._note_refusal(stage, request, reply)
        return reply

    def _note_refusal(self, stage: Stage, request: Request, reply: Reply) -> None:
        self.refusals[stage, reply.code] += 1
        for notify in self.on_refused:
            notify(request, reply)

    def _failed(self, request: Request, error: Exception) -> Reply:
        if isinstance(error, RequestError):
            return Reply(error.fields, code=error.code, remark=error.remark)
        if isinstance(error, msgspec.MsgspecError):
            code = request.command.code
            remark = f"malformed request {code_name(code)} ({code}): {error}"
            return Reply(code=ResponseCode.INVALID_PARAMETER, remark=remark)
        self._unexpected(request, error)
        return Reply(
            code=ResponseCode.SYSTEM_ERROR,
            remark=f"{type(error).__name__}: {error} (see the log of this daemon)",
        )


def check_body(request: Request) -> None:
    """Raise OutOfBounds or MalformedJson for a large body before it is decoded."""
    body, code = request.body, request.command.code
    check_size(code, len(body))
    if body_of(code).is_json:
        request.body = fastjson.bounded(body)


def _greet(channel: Channel, command: Command) -> None:
    channel.greet()
    # The request's function rejects unreadable fields.
    with contextlib.suppress(msgspec.ValidationError):
        if HEADRACE_MARK in command.ext():
            channel.write(*notice(RequestCode.HEADRACE_HELLO))


def _unknown(request: Request) -> Reply:
    raise RequestError(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f" request type {request.command.code} not supported",
    )


# What a request waits for whose function has returned without an answer.
_UNKNOWN = "a flush, a save or a client"
