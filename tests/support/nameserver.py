"""A nameserver without sockets, and brokers that register with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace_daemon.access.opening import NoUsers, OpenedAccess
from headrace_daemon.quotas.processor import QuotaProcessor
from headrace_daemon.quotas.table import QuotaTable
from headrace_nameserver import registrations
from headrace_nameserver.broker_names import BrokerNames
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.kv_config import KVConfig
from headrace_nameserver.processors import NameServerProcessor, Policy
from headrace_nameserver.registrations import BrokerTopics
from headrace_nameserver.routes import RouteTable
from headrace_nameserver.settings_requests import SettingsRequests
from headrace_protocol.bodies import DataVersion, TopicConfig, TopicConfigSerializeWrapper
from headrace_protocol.command import FLAG_ONEWAY, VERSION, Command, header_fields
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.nameserver_headers import RegisterBrokerHeader
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.serving import Registry
from tests.support.channel import MemoryChannel

HA_ADDRESS = "127.0.0.1:10912"


@dataclass
class NameServerUnderTest:
    """Table and processors on a clock that the test sets.

    access: judges requests, with the names of brokers in brokerNames.json of ``names_folder``.
    """

    table: RouteTable = field(default_factory=RouteTable)
    now_ms: int = 1_000_000
    wall_ms: int = 1_700_000_000_000
    order_message_enable: bool = False
    register_from_own_address: bool = False
    kv_config_path: Path | None = None
    kv_limits: dict[str, int] = field(default_factory=dict)
    access: OpenedAccess | None = None
    names_folder: Path | None = None
    unexpected: list[Exception] = field(default_factory=list)
    channel: MemoryChannel = field(default_factory=MemoryChannel)

    def __post_init__(self) -> None:
        self.registry = Registry(lambda _, error: self.unexpected.append(error))
        processor = NameServerProcessor(
            self.table,
            KVConfig(self.kv_config_path, **self.kv_limits),
            lambda: self.now_ms,
            Policy(self.order_message_enable, self.register_from_own_address),
            broker_names=self._broker_names(),
            wall_ms=lambda: self.wall_ms,
        )
        processor.register(self.registry)
        SettingsRequests(NameServerConfig()).register(self.registry)
        QuotaProcessor(QuotaTable(None), processor.log).register(self.registry)
        (self.access.requests if self.access else NoUsers()).register(self.registry)
        if self.access is not None:
            self.registry.guard(self.access.access.check)
        processor.begin()

    def _broker_names(self) -> BrokerNames | None:
        folder = self.names_folder
        return BrokerNames(KVConfig(folder / "brokerNames.json")) if folder else None

    def take(
        self, data: bytes, channel: MemoryChannel | None = None
    ) -> list[tuple[Command, bytes]]:
        """The replies to frames."""
        channel = channel or self.channel
        self.registry.handle(channel, FrameReader().feed(data))
        return channel.replies()

    def ask(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: bytes = b"",
        *,
        version: int = VERSION,
        channel: MemoryChannel | None = None,
    ) -> tuple[Command, bytes]:
        """The one reply to a request."""
        (reply,) = self.take(frame(code, header, body, version=version), channel)
        return reply


def frame(
    code: int,
    header: msgspec.Struct | None = None,
    body: bytes = b"",
    *,
    version: int = VERSION,
    oneway: bool = False,
) -> bytes:
    return (
        encode_frame(
            SerializeType.JSON,
            code,
            1,
            flag=FLAG_ONEWAY if oneway else 0,
            fields=header_fields(header),
            body_bytes=len(body),
            version=version,
        )
        + body
    )


def register_header(
    name: str = "b0", broker_id: int = 0, address: str = "127.0.0.1:10911", **fields: Any
) -> RegisterBrokerHeader:
    fields.setdefault("cluster_name", "c0")
    fields.setdefault("ha_server_addr", HA_ADDRESS)
    return RegisterBrokerHeader(
        broker_name=name, broker_id=broker_id, broker_addr=address, **fields
    )


def broker_topics(header: RegisterBrokerHeader, body: RegisterBrokerBody) -> BrokerTopics:
    """The part of a registration that a route table reads."""
    return registrations.check(header, body)


def register_body(*topics: TopicConfig | str, version: int = 1) -> RegisterBrokerBody:
    """A registration of topics, given by name or whole."""
    configs = [TopicConfig(topic_name=t) if isinstance(t, str) else t for t in topics]
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigSerializeWrapper(
            data_version=DataVersion(timestamp=5, counter=version),
            topic_config_table={config.topic_name: config for config in configs},
        )
    )
