"""SimpleConsumer: takes messages out one by one; members share messages instead of queues."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self, Unpack

import anyio

from headrace.config import check_count, check_limits, check_time
from headrace.consumer.direct import refuse
from headrace.consumer.leases import MemberLeases, milliseconds
from headrace.consumer.polls import Polls, Receive
from headrace.consumer.pops import PopMember
from headrace.consumer.rates import Rates
from headrace.consumer.running_info import consumer_status, running_info
from headrace.consumer.start import consume_from_where
from headrace.consumer.subscription import Filters, expressions_of, subscriptions_of
from headrace.errors import ConfigurationError, InvalidValue
from headrace.instance import ClientInstance
from headrace.lifecycle import Startable
from headrace.names import check_group
from headrace.popped import PoppedMessage, begin_processing
from headrace.received import BodyLimits
from headrace.tasks import wait_if_async
from headrace.trace_start import start_traces
from headrace.typed import Typed
from headrace.values import shown
from headrace_protocol.bodies import ConsumerData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.compression import BODY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from headrace.config import ConnectOptions
    from headrace.typed import OnBad
    from headrace_protocol.connection import RequestReceived
    from headrace_protocol.drivers.aio import AsyncConnection, Connect

_LEAVE_S = 5.0
_LONGEST_WAIT_S = 3600.0


class SimpleConsumer(Startable):
    """Takes messages of its topics out, one by one; members of a group share messages, not queues.

    Use it in ``async with``, or ``start`` and ``stop`` it.

    group: a message is out for one member of the group at a time.
    topics: a topic, several topics, or topics with tag expressions; see Consumer.
    filter: SQL92 condition on properties, instead of tags; see Consumer.
    start: where a group begins that is new to a broker: "earliest" or "latest".
    model, on_bad: the type of the values that ``receive_values`` returns, and what happens to a
        message that is none; see Consumer.
    body_bytes_max: reading a compressed body that is larger when decompressed raises an error.

    A message that is not acknowledged while it is out comes again, in any order. So any number of
    members can work on one queue, and a slow message delays no other. Needs brokers of headrace, or
    of Apache RocketMQ from 5.1 on. Static topics can't be read in this way.
    """

    def __init__(
        self,
        group: str,
        topics: str | Iterable[str] | Mapping[str, str],
        *,
        filter: Filters = None,  # noqa: A002 - as users call it
        nameserver: str | Sequence[str] | None = None,
        start: Literal["earliest", "latest"] = "earliest",
        body_bytes_max: int = BODY_BYTES_MAX,
        model: type[Any] | None = None,
        on_bad: OnBad | None = None,
        connect: Connect | None = None,
        **how: Unpack[ConnectOptions],
    ) -> None:
        self.group = check_group(group)
        if start not in ("earliest", "latest"):
            raise ConfigurationError(f"start={shown(start)}: must be 'earliest' or 'latest'")
        check_limits(body_bytes_max=body_bytes_max)
        self._start: Literal["earliest", "latest"] = start
        expressions = expressions_of(topics)
        self._typed = Typed.of(expressions, model, on_bad)
        self._subscriptions = subscriptions_of(group, expressions, filter)
        self._instance = ClientInstance(nameserver, connect=connect, how=how)
        self._rates = Rates()
        self._leases = MemberLeases(self._instance, self.group, "SimpleConsumer")
        member = PopMember(self.group, start == "latest", BodyLimits(body_bytes_max))
        self._polls = Polls(self._instance, member, self._subscriptions, self._leases)

    async def __aenter__(self) -> Self:
        self._instance.consumers = [
            ConsumerData(
                group_name=self.group,
                consume_type="CONSUME_POP",
                consume_from_where=consume_from_where(self._start),
                subscription_data_set=[each.data() for each in self._subscriptions],
            )
        ]
        self._rates.begin()
        self._instance.handlers = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: _ignore,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._on_running_info,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: _on_status,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: refuse,
        }
        tasks = await self._instance.start()
        start_traces(self._instance, tasks)
        self._leases.open(tasks)
        self._polls.open(tasks)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            with anyio.move_on_after(_LEAVE_S, shield=True):
                await self._leases.close()
                await self._polls.close()
        finally:
            await self._instance.stop()

    async def receive(
        self,
        *,
        max: int = 32,  # noqa: A002 - the word for it
        wait: float = 20,
        invisible: float = 30,
    ) -> list[PoppedMessage]:
        """Take up to ``max`` messages out; an empty list if none came in time.

        wait: seconds to wait for the first message, 0 to 3600; 0 takes what is there.
        invisible: seconds for which the messages are out, up to 43,200.

        All brokers are asked at once, and the first that has messages answers; one broker gives 32
        at most. What others bring meanwhile is kept for the next call, for half of its time.

        Raises AccessDenied and other errors that waiting does not mend at once; an error of a
        broker that is away only if no broker could be asked.
        """
        self._instance.check_open("SimpleConsumer")
        count = check_count("max", max) or 1
        check_time(wait=wait)
        if wait > _LONGEST_WAIT_S:
            raise ConfigurationError(f"wait={wait:g}: must be at most {_LONGEST_WAIT_S:g} seconds")
        until = anyio.current_time() + wait
        call = Receive(count, until, milliseconds("invisible", invisible))
        tracing = self._instance.tracing
        started_ns = time.time_ns() if tracing else 0
        messages = await self._polls.receive(call)
        if tracing and messages:
            begin_processing(messages, tracing, self.group, started_ns)
        return messages

    async def receive_values(
        self,
        *,
        max: int = 32,  # noqa: A002 - as ``receive``
        wait: float = 20,
        invisible: float = 30,
    ) -> list[tuple[Any, PoppedMessage]]:
        """As ``receive``, but returns values with their messages.

        Requires ``model`` or a ``Topic``. Messages that are no values are left to ``on_bad``.
        """
        found = []
        for message in await self.receive(max=max, wait=wait, invisible=invisible):
            try:
                found.append((self._typed.read(message), message))
            except InvalidValue as error:
                await wait_if_async(self._typed.settle(error, message))
        return found

    async def ack(self, messages: Iterable[PoppedMessage]) -> None:
        """Acknowledge several messages, in one request to each broker.

        Raises as ``PoppedMessage.ack``, once all are answered, ConfigurationError.
        """
        found: list[Any] = [*messages] if isinstance(messages, Iterable) else [None]
        if not all(isinstance(each, PoppedMessage) for each in found):
            raise ConfigurationError(
                f"messages={shown(messages)}: must be several that receive has returned; "
                "message.ack() acknowledges one"
            )
        await self._leases.ack_all(found)

    def _on_running_info(self, connection: AsyncConnection, request: RequestReceived) -> None:
        (member,) = self._instance.consumers
        info = running_info(member, (), self._subscriptions, self._rates)
        connection.respond(request, ResponseCode.SUCCESS, body=info)


def _on_status(connection: AsyncConnection, request: RequestReceived) -> None:
    connection.respond(request, ResponseCode.SUCCESS, body=consumer_status({}, request))


def _ignore(_connection: AsyncConnection, _request: RequestReceived) -> None:
    """Members don't share queues, so nothing follows from a change of the members."""
