"""The base of every client: connections, routes, heartbeats, and replies to brokers' requests.

An instance belongs to one Producer, consumer or Admin and lives as long as that client's block.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio

from headrace.config import resolve_account, resolve_nameservers, resolve_tls, resolve_trace
from headrace.errors import (
    AccessDenied,
    ClientClosed,
    ConfigurationError,
    ConnectFailed,
    ConnectionLost,
    HeadraceError,
    MalformedAnswer,
    NameserverUnavailable,
    NoQueue,
    RequestTimeout,
    RouteNotFound,
    WrongEventLoop,
    WrongServer,
)
from headrace.log_ins import LogIns
from headrace.loops import current_loop
from headrace.outages import ClientOutages
from headrace.route import TopicRoute
from headrace.tasks import Background, gather
from headrace.telemetry import tracing
from headrace_protocol.bodies import ConsumerData, HeartbeatData, ProducerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.connection import RequestReceived
from headrace_protocol.drivers.address import local_ip
from headrace_protocol.drivers.aio import AsyncConnection, Connect, connect_tcp, open_stream
from headrace_protocol.drivers.response import Response
from headrace_protocol.headers import UnregisterClientHeader
from headrace_protocol.message_ids import host_text
from headrace_protocol.nameserver_headers import (
    REGISTRATION_PERIOD_MS,
    GetRouteInfoHeader,
    GetRouteInfoResponseHeader,
)
from headrace_protocol.tls.names import ServerNames

if TYPE_CHECKING:
    import msgspec
    from anyio.abc import TaskGroup

    from headrace.config import ConnectOptions
    from headrace.telemetry import MessageTraces, Tracing
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.command import Command
    from headrace_protocol.frame import Buffer

_log = logging.getLogger("headrace.client")

REQUEST_TIMEOUT_MS = 5000
# It answers from memory, and there may be others to ask. RocketMQ's.
NAMESERVER_TIMEOUT_MS = 3000
HEARTBEAT_INTERVAL_S = 30.0
ROUTE_INTERVAL_S = 30.0
_GOODBYE_S = 3.0
_CONFLICTS_KEPT = 100
# Longer than any restart of a broker: until then, a topic that was known is expected back.
_FORGET_ROUTE_S = 600.0
_NEW_ROUTE_S = 2.0
_EVERY_NAMESERVER_SERVES = frozenset(
    {RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO}
)
_NEW_ROUTE_PAUSE_S = 0.01
# In a remark: a part of a heartbeat is not permitted.
_REST_TAKEN = "the rest of the heartbeat was taken"
# A route that lacks something is not trusted for longer.
_MISSING_ROUTE_S = 0.2

RequestHandler = Callable[[AsyncConnection, RequestReceived], None]


def _connector(options: ConnectOptions, nameserver: object, names: ServerNames) -> Connect:
    """Connects with TLS, or without. Raises ConfigurationError."""
    settings = resolve_tls(options, nameserver)
    if settings is None:
        return connect_tcp
    from headrace_protocol.tls.connect import tls_connector
    from headrace_protocol.tls.settings import TlsError

    try:
        return tls_connector(settings, names)
    except TlsError as error:
        raise ConfigurationError(str(error)) from error


class ClientInstance:
    """Connections to nameservers and brokers, shared by the parts of one client.

    client_id: ``ip@pid#nanoseconds``, or ``ip@instance_name``; it distinguishes the members of a
        group.
    connect: opens its connections; an argument is in place of TCP and TLS, e.g. in memory.
    how: TLS and user of its connections.
    producer_group: announced to brokers when not None.
    consumers: consumer groups to announce in heartbeats; filled by consumers.
    handlers: handlers of brokers' requests, by code; filled by consumers.
    outages: what the client's retries wait for.
    trace_topic: where to write a message trace; None without one. traces: see ``start_traces``.
    server_names: those of brokers that the client has heard of.
    """

    def __init__(
        self,
        nameserver: str | Sequence[str] | None = None,
        *,
        connect: Connect | None = None,
        how: ConnectOptions | None = None,
        producer_group: str | None = None,
        instance_name: str | None = None,
    ) -> None:
        self.nameservers = resolve_nameservers(nameserver)
        self._instance_name = instance_name
        self.outages = ClientOutages(self.nameservers, anyio.current_time)
        self.client_id = self._new_client_id()
        self.producer_group = producer_group
        self.consumers: list[ConsumerData] = []
        self.handlers: dict[int, RequestHandler] = {}
        self.server_names = ServerNames()
        self.connect = connect or _connector(how or {}, nameserver, self.server_names)
        account = resolve_account(how or {}, nameserver)
        self._log_ins = None if account is None else LogIns(account, self.outages)
        self._connections: dict[str, AsyncConnection] = {}
        self._opened_at: dict[str, float] = {}
        self._connecting: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._routes: dict[str, TopicRoute] = {}
        self._fetching: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        # Observer of its messages, if there is one.
        self.tracing: Tracing | None = None
        self.trace_topic = resolve_trace(how or {})
        self.traces: MessageTraces | None = None
        self._background = Background()
        self._tasks: TaskGroup | None = None
        self._loop: object = None
        self._pid = os.getpid()
        # What brokers said of groups whose members' subscriptions differ.
        self._conflicts: set[str] = set()

    # -- life --------------------------------------------------------------------------------------

    def _new_client_id(self) -> str:
        return f"{local_ip()}@{self._instance_name or f'{os.getpid()}#{time.time_ns()}'}"

    async def start(self) -> TaskGroup:
        """Start the background tasks; return the task group for the client's own tasks."""
        if self._tasks is not None:
            raise ConfigurationError("this client is already open; use it in one block at a time")
        self._loop = current_loop()
        if self._pid != os.getpid():
            # Each child of a process that created the client is a member of its own.
            self._pid, self.client_id = os.getpid(), self._new_client_id()
        self.tracing = tracing(self.client_id)
        self._has_left = False
        self._tasks = await self._background.start()
        self._tasks.start_soon(self._heartbeat_regularly)
        self._tasks.start_soon(self._refresh_routes_regularly)
        return self._tasks

    async def stop(self) -> None:
        """Unregister from the brokers, within a deadline, and end all tasks."""
        if self._tasks is None:
            return
        try:
            with anyio.move_on_after(_GOODBYE_S, shield=True):
                await self.leave()
                if self.traces:
                    await self.traces.write()
        finally:
            self._tasks = None
            await self._background.stop()
            # The loop's end may cancel a connection's task before its first step.
            for connection in self._connections.values():
                if connection.is_open:
                    await connection.close()
            self._connections.clear()

    def check_started(self, what: str) -> None:
        """Raise ClientClosed unless the instance is started and not stopped."""
        if self._tasks is None:
            raise ClientClosed(what)

    def check_open(self, what: str) -> None:
        """Raise ClientClosed unless it is started; WrongEventLoop if on another event loop."""
        self.check_started(what)
        if self._loop is not current_loop():
            raise WrongEventLoop(what)

    # -- connections -------------------------------------------------------------------------------

    async def request(
        self,
        address: str,
        code: int,
        header: msgspec.Struct | None = None,
        body: Buffer = b"",
        *,
        timeout_ms: float = REQUEST_TIMEOUT_MS,
    ) -> Response:
        """Send a request to ``address``. Raises ConnectFailed, ConnectionLost, RequestTimeout."""
        connection = await self.connection(address)
        return await connection.request(code, header, body, timeout_ms=timeout_ms)

    def open_connection(self, address: str) -> AsyncConnection | None:
        """The open connection to ``address``, or None."""
        connection = self._connections.get(address)
        return connection if connection and connection.is_open else None

    async def connection(self, address: str) -> AsyncConnection:
        """The connection to ``address``, opened if necessary. Raises ConnectFailed."""
        connection = self.open_connection(address)
        if connection:
            return connection
        async with self._connecting[address]:
            return self.open_connection(address) or await self._open(address)

    async def _open(self, address: str) -> AsyncConnection:
        if self._tasks is None:
            raise ClientClosed("the client")
        stream = await open_stream(self.connect, address)
        connection = AsyncConnection(stream, address, self._on_request)
        try:
            self._tasks.start_soon(connection.run)
        except RuntimeError:
            # The end of the event loop has cancelled the group, before the block is left.
            await connection.close()
            raise ClientClosed("the client") from None
        if self._log_ins is not None:
            lifetime_s = await self._log_ins.log_in(connection)
            if lifetime_s is not None:
                self._tasks.start_soon(self._log_ins.stay, connection, lifetime_s)
        self._connections[address] = connection
        self._opened_at[address] = anyio.current_time()
        if address not in self.nameservers:
            # A broker tracks the members of a group by the connections that sent a heartbeat.
            self._heartbeat(connection)
        return connection

    def _on_request(self, connection: AsyncConnection, request: RequestReceived) -> None:
        handler = self.handlers.get(request.command.code)
        try:
            if handler:
                handler(connection, request)
                return
            reason = f"this client does not handle request code {request.command.code}"
            code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        except (ValueError, RecursionError) as error:
            reason = f"malformed request with code {request.command.code}: {error}"
            code = ResponseCode.INVALID_PARAMETER
            _log.warning("%s sent a %s", connection.address, reason)
        if not request.command.is_oneway:
            connection.respond(request, code, remark=reason)

    # -- nameservers and routes --------------------------------------------------------------------

    async def ask_nameserver(
        self, code: int, header: msgspec.Struct | None = None, body: Buffer = b""
    ) -> Response:
        """Send a request to each nameserver until one answers. Raises NameserverUnavailable."""
        failures: dict[str, Exception] = {}
        for address in self.nameservers:
            try:
                response = await self.request(
                    address, code, header, body, timeout_ms=NAMESERVER_TIMEOUT_MS
                )
                _check_nameserver(response)
            except (ConnectFailed, ConnectionLost, RequestTimeout, WrongServer) as error:
                failures[address] = error
            else:
                self._prefer(address)
                self.outages.worked(self.outages.nameserver)
                return response
        raise NameserverUnavailable(failures)

    def _prefer(self, address: str) -> None:
        if address != self.nameservers[0]:
            others = (other for other in self.nameservers if other != address)
            self.nameservers = (address, *others)

    async def route(self, topic: str) -> TopicRoute:
        """The topic's route, from the cache while it is current.

        Raises RouteNotFound, NameserverUnavailable, MalformedAnswer.
        """
        route = self._routes.get(topic)
        if route and route.is_current:
            return route
        async with self._fetching[topic]:
            route = self._routes.get(topic)
            if route and route.is_current:
                return route
            return await self._refresh(topic)

    async def current_route(self, topic: str) -> TopicRoute:
        """The topic's route; asked for again if something was missing. Raises as ``route``."""
        route = await self.route(topic)
        if route.missing and anyio.current_time() > route.fetched_at + _MISSING_ROUTE_S:
            self.invalidate_route(topic)
            route = await self.route(topic)
        return route

    def known_route(self, topic: str) -> TopicRoute | None:
        """The topic's last known route, which may be out of date."""
        return self._routes.get(topic)

    def invalidate_route(self, topic: str) -> None:
        """Make the next use of the topic's route ask the nameserver first."""
        route = self._routes.get(topic)
        if route:
            route.is_current = False

    def invalidate_routes(self) -> None:
        """Make the next use of each route ask the nameserver first."""
        for route in self._routes.values():
            route.is_current = False

    async def _refresh(self, topic: str) -> TopicRoute:
        known = self._routes.get(topic)
        try:
            route = await self.fetch_route(topic)
        except (NameserverUnavailable, MalformedAnswer) as error:
            # Brokers keep working without their nameservers, and so can clients.
            if known is None:
                raise
            self.outages.report(error, topic)
            known.is_current = True
            return known
        self.outages.know(route)
        if known and known.data == route.data:
            known.fetched_at, known.is_current = route.fetched_at, True
            return known
        if known:
            known.is_current = False
        self._routes[topic] = route
        return route

    async def fetch_route(self, topic: str) -> TopicRoute:
        """The topic's route, fresh from a nameserver.

        Raises RouteNotFound, NameserverUnavailable, BrokerError, MalformedAnswer.
        """
        header = GetRouteInfoHeader(topic=topic, accept_standard_json_only=True, departed=True)
        response = await self.ask_nameserver(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        if response.command.code == ResponseCode.TOPIC_NOT_EXIST:
            raise RouteNotFound(
                topic, response.command.remark, awaits_broker=self._awaits_broker(topic, response)
            )
        route = TopicRoute.of(topic, response, anyio.current_time())
        self.server_names.learn(route.data.broker_datas)
        return route

    def _awaits_broker(self, topic: str, response: Response) -> bool:
        """True if a broker may yet register ``topic``, which the nameserver does not know.

        headrace's nameserver says so. Apache's does not; there, a topic that was known is expected
        back, and any topic until the nameserver has been seen up for a whole registration period.
        """
        reported = response.header(GetRouteInfoResponseHeader).awaits_broker
        if reported is not None:
            return reported
        seen_up_s = anyio.current_time() - self._opened_at[response.address]
        return topic in self._routes or seen_up_s * 1000 < REGISTRATION_PERIOD_MS

    async def wait_for_route(self, topic: str) -> None:
        """Wait a short time until the nameservers know a topic that was just created.

        Brokers register topics asynchronously, and a new topic is usually needed at once.
        """
        pause_s = _NEW_ROUTE_PAUSE_S
        with anyio.move_on_after(_NEW_ROUTE_S):
            while True:
                try:
                    await self.fetch_route(topic)
                except RouteNotFound:
                    await anyio.sleep(pause_s)
                    pause_s *= 2
                else:
                    return

    async def broker_address(self, topic: str, broker_name: str, broker_id: int = 0) -> str:
        """Address of a broker that serves ``topic``. Raises NoQueue if the broker is gone."""
        address = (await self.route(topic)).address(broker_name, broker_id)
        if address is None:
            self.invalidate_route(topic)
            raise NoQueue(topic, f"use on broker {broker_name}", broker_name=broker_name)
        return address

    def known_address(self, topic: str, broker_name: str) -> str:
        """The address of a broker by the topic's last known route; "" without one."""
        route = self._routes.get(topic)
        return (route.address(broker_name) if route else None) or ""

    async def queue_address(self, queue: MessageQueue, broker_id: int = 0) -> str:
        """Address of the broker that serves a queue. Raises NoQueue if there is none now."""
        route = await self.route(queue.topic)
        address = route.address_of(queue, broker_id)
        if address is None:
            self.invalidate_route(queue.topic)
            raise route.unserved(queue)
        return address

    async def by_address(
        self, queues: Iterable[MessageQueue], failures: dict[str, HeadraceError]
    ) -> list[tuple[str, list[MessageQueue]]]:
        """The queues of each broker's address; a broker without one goes into ``failures``."""
        by_address = defaultdict(list)
        for queue in queues:
            if self.broker_of(queue) in failures:
                continue
            try:
                address = await self.queue_address(queue)
            except HeadraceError as error:
                failures[self.broker_of(queue)] = error
            else:
                by_address[address].append(queue)
        return list(by_address.items())

    async def at_each_broker(
        self,
        queues: Iterable[MessageQueue],
        work: Callable[[tuple[str, list[MessageQueue]]], Awaitable[None]],
    ) -> None:
        """Do something with the queues of each broker, given with its address, side by side.

        One that fails holds up no other. Raises the error of the first that failed.
        """
        failures: dict[str, HeadraceError] = {}
        by_address = await self.by_address(queues, failures)
        for error in (*failures.values(), *await gather(work, by_address)):
            if error is not None:
                raise error

    async def stored_at(self, queue: MessageQueue, store_host: bytes) -> str:
        """Address of the broker that stored a message of a queue.

        store_host: from the record. A static topic's queue may have another broker by now. Raises
        NoQueue if the broker is gone.
        """
        route = await self.route(queue.topic)
        if route.is_static:
            address = host_text(store_host)
            if route.broker_at(address):
                return address
        return await self.queue_address(queue)

    async def ask_queue(
        self, queue: MessageQueue, code: int, header: msgspec.Struct, body: Buffer = b""
    ) -> Response:
        """Send a request about a queue to its broker, and again if the queue has moved.

        Raises NoQueue and the errors of ``request``.
        """
        response = await self.request(await self.queue_address(queue), code, header, body)
        if response.command.code != ResponseCode.NOT_LEADER_FOR_QUEUE:
            return response
        self.invalidate_route(queue.topic)
        return await self.request(await self.queue_address(queue), code, header, body)

    def broker_of(self, queue: MessageQueue) -> str:
        """Name of the broker that serves a queue, by the last known route."""
        route = self._routes.get(queue.topic)
        return route.broker_of(queue) if route else queue.broker_name

    async def _refresh_routes_regularly(self) -> None:
        while True:
            await anyio.sleep(ROUTE_INTERVAL_S)
            for topic in list(self._routes):
                try:
                    await self._refresh(topic)
                except RouteNotFound:
                    self._mark_missing(self._routes[topic])
                except HeadraceError:
                    break  # retried when a client needs a route, or in the next round

    def _mark_missing(self, route: TopicRoute) -> None:
        """Invalidate a route that the nameserver no longer knows; forget it after a while."""
        route.is_current = False
        if anyio.current_time() - route.fetched_at > _FORGET_ROUTE_S:
            del self._routes[route.topic]

    # -- heartbeats --------------------------------------------------------------------------------

    async def heartbeat(self, addresses: Sequence[str]) -> None:
        """Send a heartbeat to each of these brokers and wait for the answers."""
        body = self._heartbeat_body()
        for address in addresses:
            response = await self.request(address, RequestCode.HEART_BEAT, None, body)
            if not self._is_taken_in_part(response):
                self._report_conflict(response.expect().command.remark)

    def _is_taken_in_part(self, response: Response) -> bool:
        """True if a broker has taken what is permitted of a heartbeat; reports the rest."""
        error = None if response.command.code == ResponseCode.SUCCESS else response.error()
        if isinstance(error, AccessDenied) and _REST_TAKEN in (error.remark or ""):
            self.outages.denied(error)
            return True
        return False

    async def _heartbeat_regularly(self) -> None:
        while True:
            await anyio.sleep(HEARTBEAT_INTERVAL_S)
            for connection in self._broker_connections():
                self._heartbeat(connection)

    def _heartbeat(self, connection: AsyncConnection) -> None:
        if not self._has_left and (self.producer_group or self.consumers):
            heard = partial(self._heard, connection.address)
            connection.submit(RequestCode.HEART_BEAT, None, self._heartbeat_body(), heard)

    def _heard(
        self,
        address: str,
        command: Command | None,
        body: memoryview | None,
        _error: HeadraceError | None,
    ) -> None:
        """Take the answer to a heartbeat; after an error the next heartbeat is sent in any case."""
        if command is None or body is None:
            return
        response = Response(address, RequestCode.HEART_BEAT, command, body)
        if command.code == ResponseCode.SUCCESS or self._is_taken_in_part(response):
            self.outages.worked(self.outages.at(address))
            self._report_conflict(command.remark)
        elif isinstance(error := response.error(), AccessDenied):
            self.outages.denied(error)

    def _report_conflict(self, text: str | None) -> None:
        """Log once what a broker says of members of a group whose subscriptions differ."""
        if text and text not in self._conflicts:
            if len(self._conflicts) >= _CONFLICTS_KEPT:
                self._conflicts.clear()
            self._conflicts.add(text)
            _log.warning("%s", text)

    def _heartbeat_body(self) -> bytes:
        producers = [ProducerData(group_name=self.producer_group)] if self.producer_group else []
        heartbeat = HeartbeatData(
            client_id=self.client_id,
            producer_data_set=producers,
            consumer_data_set=self.consumers,
        )
        return heartbeat.encode(strict=True)

    def _broker_connections(self) -> list[AsyncConnection]:
        return [
            connection
            for address, connection in self._connections.items()
            if connection.is_open and address not in self.nameservers
        ]

    async def leave(self) -> None:
        """Unregister from the brokers, which first answer held POPs; heartbeats end."""
        if self._has_left:
            return
        self._has_left = True
        headers = [
            UnregisterClientHeader(client_id=self.client_id, consumer_group=consumer.group_name)
            for consumer in self.consumers
        ]
        if self.producer_group:
            headers.append(
                UnregisterClientHeader(client_id=self.client_id, producer_group=self.producer_group)
            )
        for connection in self._broker_connections():
            for header in headers:
                try:
                    await connection.request(
                        RequestCode.UNREGISTER_CLIENT, header, timeout_ms=REQUEST_TIMEOUT_MS
                    )
                except HeadraceError:
                    break  # the broker notices by itself when the connection closes


def _check_nameserver(response: Response) -> None:
    """Raise WrongServer if the server rejects what every nameserver serves."""
    if (
        response.command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        and response.request_code in _EVERY_NAMESERVER_SERVES
    ):
        reason = (
            "is not a nameserver, but perhaps a broker: give the nameserver's address, whose port "
            "is usually 9876"
        )
        raise WrongServer(response.address, reason)
