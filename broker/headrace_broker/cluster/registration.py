"""Registration of the broker and its topics at all nameservers.

One connection to each nameserver stays open; if it breaks, the nameserver drops the broker at once.
Source: docs/protocol.md "Registration".
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from headrace_broker.peers.callers import REGISTRATION
from headrace_broker.peers.peers import Ask
from headrace_broker.store.errors import StoreMissing
from headrace_daemon.slices import in_slices
from headrace_protocol import fastjson
from headrace_protocol.bodies import DataVersion, TopicConfigSerializeWrapper
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.errors import AccessDenied, HeadraceError
from headrace_protocol.errors import PortableError
from headrace_protocol.nameserver_headers import RegisterBrokerHeader, UnregisterBrokerHeader
from headrace_protocol.outages import Outages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace_broker.config import BrokerConfig
    from headrace_broker.peers.nameservers import Nameservers
    from headrace_broker.topics.table import TopicTable

log = structlog.get_logger("headrace.broker.registration")

_RETRY_S = 2.0
_UNREGISTER_TIMEOUT_S = 3.0
_CRC_MASK = 0x7FFFFFFF


class IdentityTaken(PortableError):
    """Another running broker has this name and id."""

    def __init__(self, config: BrokerConfig, other_address: str, nameserver: str) -> None:
        super().__init__(
            f"broker {config.broker_name} with id {config.broker_id} already runs at "
            f"{other_address} (according to nameserver {nameserver}): give this one another "
            "brokerName or brokerId, or stop the other"
        )


class RegistrationDenied(HeadraceError):
    """A nameserver does not let this broker register."""

    def __init__(self, denial: AccessDenied) -> None:
        super().__init__(
            f"{denial.remark} (set innerClientAuthenticationCredentials to those of a user with "
            "Update on the cluster at that nameserver, such as its own)"
        )


class Mappings(Protocol):
    """The queues of static topics that this broker leads."""

    data_version: DataVersion

    async def infos(self) -> fastjson.Written:
        """By topic, the queues that are led here, encoded in slices."""


class Registration:
    """Keeps one broker registered with all nameservers.

    address: where clients reach the broker.
    """

    def __init__(
        self,
        config: BrokerConfig,
        nameservers: Nameservers,
        topics: TopicTable,
        mappings: Mappings,
        before: Callable[[str], Awaitable[None]],
        address: str,
    ) -> None:
        """before: called before the first registration at a nameserver, and at every period.

        It may raise HeadraceError or StoreMissing.
        """
        self._config = config
        self._peers = nameservers.peers
        self._nameservers = nameservers
        self._topics = topics
        self._mappings = mappings
        self._before = before
        self._address = address
        self._outages = Outages(log.warning, trio.current_time)
        self._changed = trio.Event()
        self._change_count = 0
        self._has_started = False
        # Nameserver -> change count at its last registration, while the connection lasts.
        self._registered: dict[str, int] = {}
        # Change counts that callbacks wait for.
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def topics_changed(self) -> None:
        """Register again now, not at the next period."""
        self._change_count += 1
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def when_registered(self, callback: Callable[[], None]) -> None:
        """Call back once all changes so far are registered at every connected nameserver."""
        self._waiting.append((self._change_count, callback))
        self._call_registered()

    def _call_registered(self) -> None:
        registered_count = min(self._registered.values(), default=self._change_count)
        waiting, self._waiting = self._waiting, []
        for change_count, callback in waiting:
            if change_count <= registered_count:
                callback()
            else:
                self._waiting.append((change_count, callback))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stay registered until cancelled; started after the first attempt at each nameserver.

        Raises IdentityTaken or StoreMissing before it has started; later these errors are logged
        and retried.
        """
        async with trio.open_nursery() as nursery:
            tried = {nameserver: trio.Event() for nameserver in self._nameservers.addresses}
            for nameserver, event in tried.items():
                nursery.start_soon(self._stay_registered, nameserver, event)
            for event in tried.values():
                await event.wait()
            self._has_started = True
            task_status.started()

    async def unregister(self) -> None:
        """Unregister within three seconds, so that clients switch to other brokers at once."""
        with trio.move_on_after(_UNREGISTER_TIMEOUT_S):
            await self._unregister()

    async def _unregister(self) -> None:
        header = UnregisterBrokerHeader(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            broker_id=self._config.broker_id,
        )
        code = RequestCode.UNREGISTER_BROKER
        asks = [Ask(nameserver, code, header=header) for nameserver in self._registered]
        for ask, outcome in zip(asks, await self._peers.ask_many(REGISTRATION, asks), strict=True):
            if isinstance(outcome, HeadraceError):
                log.warning("unregistration failed", nameserver=ask.peer, reason=str(outcome))

    async def _stay_registered(self, nameserver: str, tried: trio.Event) -> None:
        while True:
            try:
                await self._serve_connection(nameserver, tried)
            except (HeadraceError, IdentityTaken, StoreMissing) as error:
                is_refused = not isinstance(error, HeadraceError)
                if is_refused and not self._has_started:
                    raise
                away = self._name_at(nameserver) if is_refused else f"nameserver {nameserver}"
                self._outages.failed(away, error)
            tried.set()
            await trio.sleep(_RETRY_S)

    def _name_at(self, nameserver: str) -> str:
        return f"the name {self._config.broker_name} at nameserver {nameserver}"

    async def _serve_connection(self, nameserver: str, tried: trio.Event) -> None:
        """Stay registered until the connection ends. Raises as ``before``, or IdentityTaken."""
        try:
            async with self._nameservers.hold(nameserver):
                await self._keep_registered(nameserver, tried)
        finally:
            self._registered.pop(nameserver, None)
            self._call_registered()

    async def _keep_registered(self, nameserver: str, tried: trio.Event) -> None:
        await self._check_identity(nameserver)
        await self._before(nameserver)
        due_at = trio.current_time() + self._period_s
        # Taken before each registration, so that a change made during it triggers the next.
        changed = self._changed
        await self._register(nameserver)
        self._outages.worked(f"nameserver {nameserver}")
        self._outages.worked(self._name_at(nameserver))
        log.info("registered", nameserver=nameserver, broker=self._address)
        tried.set()
        while True:
            with trio.move_on_after(self._period_s):
                await changed.wait()
            if trio.current_time() >= due_at:
                await self._before(nameserver)
                due_at = trio.current_time() + self._period_s
            changed = self._changed
            await self._register(nameserver)

    @property
    def _period_s(self) -> float:
        return self._config.register_name_server_period / 1000

    async def _register(self, nameserver: str) -> None:
        change_count = self._change_count
        body = await self._body()
        header = RegisterBrokerHeader(
            broker_name=self._config.broker_name,
            broker_addr=self._address,
            cluster_name=self._config.broker_cluster_name,
            ha_server_addr="",
            broker_id=self._config.broker_id,
            compressed=False,
            body_crc32=zlib.crc32(body) & _CRC_MASK,
        )
        ask = Ask(nameserver, RequestCode.REGISTER_BROKER, header=header, body=body)
        response = await self._peers.ask(REGISTRATION, ask)
        try:
            response.expect()
        except AccessDenied as denial:
            raise RegistrationDenied(denial) from None
        self._registered[nameserver] = change_count
        self._call_registered()

    async def _body(self) -> bytes:
        """The current topics, encoded in slices so that many don't block the loop."""
        wrapper = TopicConfigSerializeWrapper(
            data_version=self._topics.data_version, mapping_data_version=self._mappings.data_version
        )
        topics = list(self._topics.registered(self._config.broker_permission).items())
        table = await in_slices(fastjson.dumps_sliced(topics))
        infos = await in_slices(self._mappings.infos())
        body = wrapper.with_table(table, infos=infos)
        return fastjson.dumps({"filterServerList": [], "topicConfigSerializeWrapper": body})

    async def _check_identity(self, nameserver: str) -> None:
        """Raise IdentityTaken if a running broker has this name and id, to avoid split clients."""
        config = self._config
        members = await self._nameservers.members(nameserver, config.broker_name)
        other = members.get(config.broker_id, self._address)
        if other != self._address and await self._peers.is_alive(other):
            raise IdentityTaken(config, other, nameserver)
