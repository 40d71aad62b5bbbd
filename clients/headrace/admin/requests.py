"""Requests of an operator to one broker, or to all brokers of a nameserver."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar, Unpack

import msgspec

from headrace.admin.arguments import plain_arguments
from headrace.errors import (
    ConfigurationError,
    HeadraceError,
    NoBroker,
    PartialAnswer,
    RouteNotFound,
)
from headrace.instance import ClientInstance
from headrace.lifecycle import Startable
from headrace.missing import departed_part
from headrace.names import check_topic
from headrace.outages import is_absence
from headrace.tasks import gather, gather_or_raise
from headrace.whole import require_whole
from headrace_protocol.bodies import MASTER_ID, ClusterInfo, KVTable
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.departed import ClusterInfoHeader, ForgetBrokerHeader
from headrace_protocol.message import INNER_BATCH, decode_records

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from headrace.config import ConnectOptions
    from headrace.missing import MissingPart
    from headrace_protocol.departed import DepartedBroker
    from headrace_protocol.drivers.aio import Connect
    from headrace_protocol.drivers.response import BodyType, Response
    from headrace_protocol.headers import QueryMessageHeader
    from headrace_protocol.message import StoredMessage

Result = TypeVar("Result")


class BrokerNode(msgspec.Struct, frozen=True, order=True):
    """One broker process; broker_id 0 is the master of its name."""

    cluster: str
    broker_name: str
    broker_id: int
    address: str


class BrokerProblem(NamedTuple):
    """A broker that is missing from a result, and the reason.

    broker_name: also ``nameserver HOST:PORT``, where nameservers are asked, too.
    """

    broker_name: str
    address: str
    error: HeadraceError

    def __str__(self) -> str:
        if isinstance(self.error, PartialAnswer):
            return self.error.parts_text
        if self.address in self.broker_name:
            return f"{self.broker_name}: {self.error}"
        return f"broker {self.broker_name} at {self.address}: {self.error}"


class BrokerRequests(Startable):
    """The base of Admin: the brokers, and requests to several of them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _check_arguments(cls)

    def __init__(
        self,
        *,
        nameserver: str | Sequence[str] | None = None,
        connect: Connect | None = None,
        **how: Unpack[ConnectOptions],
    ) -> None:
        self._instance = ClientInstance(nameserver, connect=connect, how=how)

    async def __aenter__(self) -> Self:
        await self._instance.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._instance.stop()

    async def cluster(self) -> list[BrokerNode]:
        """All brokers that the nameserver knows, sorted."""
        info = await self._cluster_info()
        return sorted(
            BrokerNode(broker.cluster, broker.broker_name, broker_id, address)
            for broker in info.broker_addr_table.values()
            for broker_id, address in broker.broker_addrs.items()
        )

    async def departed_brokers(self) -> list[DepartedBroker]:
        """The brokers that left, as the nameserver remembers them, the longest away first.

        Apache RocketMQ's nameservers remember none.
        """
        return (await self._cluster_info()).departed_brokers or []

    async def _cluster_info(self) -> ClusterInfo:
        self._instance.check_open("Admin")
        code = RequestCode.GET_BROKER_CLUSTER_INFO
        response = await self._instance.ask_nameserver(code, ClusterInfoHeader(departed=True))
        info = response.expect().decode(ClusterInfo)
        self._instance.server_names.learn(info.broker_addr_table.values())
        return info

    async def forget_broker(self, name: str) -> bool:
        """Tell all nameservers that a departed broker won't come back.

        From then on answers without it are whole, although its messages are gone.
        Returns whether any of them remembered it. Raises BrokerError if it is registered, and the
        error of a nameserver that does not answer after all have been asked.
        """
        self._instance.check_open("Admin")
        header = ForgetBrokerHeader(broker_name=name)

        async def ask(address: str) -> bool:
            response = await self._instance.request(address, RequestCode.FORGET_BROKER, header)
            if response.command.code == ResponseCode.BROKER_NOT_EXIST:
                return False
            response.expect()
            return True

        try:
            return True in await gather_or_raise(ask, list(self._instance.nameservers))
        finally:
            self._instance.invalidate_routes()

    async def broker_config(self, address: str) -> dict[str, str]:
        """A broker's settings."""
        response = await self._ask(address, RequestCode.GET_BROKER_CONFIG)
        lines = response.read(_text).splitlines()
        pairs = (line.partition("=") for line in lines if "=" in line)
        return {name.strip(): value.strip() for name, _, value in pairs}

    async def runtime_info(self, address: str) -> dict[str, str]:
        """A broker's runtime information: version, rates, offsets, times; all values are text."""
        response = await self._ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)
        return response.decode(KVTable).table

    async def update_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of a running broker; it refuses those that it reads only at startup."""
        for name, value in settings.items():
            if not name or {"\n", "\r", "="} & set(name) or {"\n", "\r"} & set(value):
                raise ConfigurationError(
                    f"setting {name!r} = {value!r}: must be a single line with a non-empty name, "
                    "and '=' is not allowed in the name"
                )
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        await self._ask(address, RequestCode.UPDATE_BROKER_CONFIG, None, text.encode())

    # -- requests to several brokers ---------------------------------------------------------------

    async def _ask(
        self, address: str, code: int, header: msgspec.Struct | None = None, body: bytes = b""
    ) -> Response:
        self._instance.check_open("Admin")
        return (await self._instance.request(address, code, header, body)).expect()

    def _asking(
        self,
        code: int,
        body_type: type[BodyType],
        header: msgspec.Struct | None = None,
        *,
        absent: int | None = None,
    ) -> Callable[[str], Awaitable[BodyType | None]]:
        """A function that asks the broker at an address, for ``_gather``.

        absent: the code of a broker that has nothing, whose answer is None.
        """

        async def ask(address: str) -> BodyType | None:
            self._instance.check_open("Admin")
            response = await self._instance.request(address, code, header)
            if response.command.code == absent:
                return None
            return response.expect().decode(body_type)

        return ask

    async def _query_page(self, address: str, header: QueryMessageHeader) -> list[StoredMessage]:
        """Messages that a broker's index finds; see ``key_query.newest``."""
        response = await self._instance.request(address, RequestCode.QUERY_MESSAGE, header)
        if response.command.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        return response.expect().read(_messages)

    async def _is_headrace(self, address: str) -> bool:
        connection = await self._instance.connection(address)
        if not connection.peer_is_headrace:
            # A headrace broker announces itself before its first answer.
            await self._ask(address, RequestCode.GET_BROKER_CONFIG)
        return connection.peer_is_headrace

    async def _gather(
        self,
        masters: Mapping[str, str],
        ask: Callable[[str], Awaitable[Result | None]],
        problems: list[BrokerProblem] | None,
    ) -> dict[str, Result]:
        """Results of ``ask`` for each address, by broker name; see Admin for ``problems``.

        A broker whose result is None has answered, and is left out.
        """
        known = {problem.address for problem in problems or ()}
        masters = {name: address for name, address in masters.items() if address not in known}
        outcomes = dict(zip(masters, await gather(ask, list(masters.values())), strict=True))
        failed = [
            BrokerProblem(name, masters[name], outcome)
            for name, outcome in outcomes.items()
            if isinstance(outcome, HeadraceError)
        ]
        if failed and (problems is None or len(failed) == len(outcomes)):
            raise failed[0].error
        if problems is not None:
            problems += failed
        return {
            name: outcome
            for name, outcome in outcomes.items()
            if outcome is not None and not isinstance(outcome, HeadraceError)
        }

    async def _ask_all(
        self,
        masters: Mapping[str, str],
        code: int,
        header: msgspec.Struct | None = None,
        body: bytes = b"",
    ) -> list[Response]:
        """Send a request to all masters, then raise the first error, if any."""
        found = await self._gather(masters, lambda at: self._ask(at, code, header, body), None)
        return list(found.values())

    async def _masters(self, broker: str | None = None) -> dict[str, str]:
        """Addresses of all masters, or of the master of ``broker``, by broker name.

        Raises NoBroker if they have left, and ConfigurationError if there never were any.
        """
        masters = {
            node.broker_name: node.address
            for node in await self.cluster()
            if node.broker_id == MASTER_ID and broker in {None, node.broker_name}
        }
        if not masters:
            departed = await self.departed_brokers()
            if left := [each for each in departed if broker in {None, each.broker_name}]:
                raise NoBroker([departed_part(each) for each in left])
            which = f"broker named {broker}" if broker else "broker"
            raise ConfigurationError(
                f"no {which} is registered at {'; '.join(self._instance.nameservers)}; start one, "
                "or choose another nameserver"
            )
        return masters

    async def _ask_topic(
        self,
        topic: str,
        ask: Callable[[str], Awaitable[Result | None]],
        problems: list[BrokerProblem] | None,
    ) -> dict[str, Result]:
        """Results of ``ask`` for each master of a topic, by broker name; see ``_gather``."""
        masters = await self._topic_masters(topic)
        await self._note_missing(topic, problems)
        found = list(problems or ())
        known_count = len(found)
        answers = await self._gather(masters, ask, found)
        new = found[known_count:]
        if problems is not None:
            problems += new
        elif new:
            first = new[0]
            if not is_absence(first.error):
                raise first.error
            route = await self._instance.route(topic)
            require_whole(topic, [route.silent_part(each.broker_name, each.error) for each in new])
        return answers

    async def _note_missing(self, topic: str, problems: list[BrokerProblem] | None) -> None:
        """Add the parts of a topic that no broker serves to ``problems``.

        Raises PartialAnswer if there are some, and no ``problems``.
        """
        route = await self._instance.current_route(topic)
        _note(topic, route.missing, problems)

    async def _note_departed(self, what: str, problems: list[BrokerProblem] | None) -> None:
        """Add all brokers that left to ``problems``. Raises as ``_note_missing``."""
        parts = [departed_part(each) for each in await self.departed_brokers()]
        _note(what, parts, problems)

    async def _left_with(self, topic: str) -> list[MissingPart]:
        """The parts of a topic on brokers that left; none of a topic that is nowhere."""
        try:
            route = await self._instance.fetch_route(topic)
        except RouteNotFound:
            return []
        return [part for part in route.missing if part.broker]

    async def _topic_masters(self, topic: str) -> dict[str, str]:
        """Addresses of the masters that have a topic, by broker name."""
        self._instance.check_open("Admin")
        check_topic(topic)
        route = await self._instance.current_route(topic)
        masters = {
            name: address for name in sorted(route.brokers) if (address := route.master(name))
        }
        if not masters:
            raise RouteNotFound(topic, "none of its brokers has a master now")
        return masters


def _check_arguments(admin: type[BrokerRequests]) -> None:
    """Let the public methods that a class defines check what they are given."""
    for name, method in list(vars(admin).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(admin, name, plain_arguments(method))


_check_arguments(BrokerRequests)


def _note(what: str, missing: Sequence[MissingPart], problems: list[BrokerProblem] | None) -> None:
    if problems is None:
        require_whole(what, missing)
        return
    known = {problem.broker_name for problem in problems}
    for part in missing:
        if part.broker not in known:
            problems.append(BrokerProblem(part.broker, "", PartialAnswer(what, [part])))


def _text(body: memoryview) -> str:
    return str(body, "utf-8")


def _messages(body: memoryview) -> list[StoredMessage]:
    """Messages of records; Apache's broker returns whole batches."""
    found = decode_records(body)
    if not any(message.sys_flag & INNER_BATCH for message in found):
        return found
    from headrace_protocol.inner_batch import unwrap_messages

    return unwrap_messages(found)
