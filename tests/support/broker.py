"""A broker without sockets and tasks: its tables, its store and its processors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from headrace_broker import assembly
from headrace_broker.compaction.compaction import Compaction
from headrace_broker.config import BrokerConfig
from headrace_broker.core import Pace, Surroundings, build_core
from headrace_broker.schedule.schedule import Schedule
from headrace_broker.staging.staging import Staging
from headrace_broker.statictopic.changes import StaticTopicChanges
from headrace_broker.statictopic.traffic import StaticTraffic
from headrace_broker.tiered.access.tiered_storage import TieredStorage
from headrace_broker.timer.timers import Timers
from headrace_broker.transaction.transactions import Transactions
from headrace_daemon.access.opening import OpenedAccess
from headrace_daemon.network import MemoryNetwork
from headrace_daemon.services import Services
from headrace_daemon.serving.server_channel import ServerChannel
from headrace_daemon.slices import Fetches, SlicedWork
from headrace_protocol.at_once import fetch_at_once, run_at_once
from headrace_protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData, TopicConfig
from headrace_protocol.channel import Channel
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import VERSION, Command, header_fields
from headrace_protocol.errors import NotReady
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import StoredMessage
from headrace_protocol.serving import Then
from tests.support.channel import MemoryChannel
from tests.support.features import part
from tests.support.stores import (
    SetClock,
    close_stores,
    forget_stores,
    new_store,
    put,
    read_all,
)

_T = TypeVar("_T")


class WorkAtOnce(SlicedWork):
    """Runs everything in one slice."""

    def start(self, work: Iterator[None]) -> None:
        run_at_once(work)


class FetchesAtOnce(Fetches):
    """Waits for the disk without a thread."""

    def start(self, channel: Channel, wait: NotReady, then: Then) -> None:
        fetch_at_once(channel, wait, then)


def at_once() -> Pace:
    """For a broker whose services do not run."""
    return Pace(WorkAtOnce(), FetchesAtOnce(), math.inf)


def _read_on(channel: ServerChannel, *, is_held_back: bool) -> None:
    pass


@dataclass
class Answer:
    """The answer that a client gets."""

    command: Command
    body: bytes

    @property
    def code(self) -> int:
        return self.command.code

    @property
    def remark(self) -> str:
        return self.command.remark or ""


_begun: list[BrokerUnderTest] = []


@contextmanager
def brokers_of_a_test() -> Iterator[None]:
    """Close what a test leaves open; no request may have failed for a fault of ours."""
    _begun.clear()
    yield
    close_stores()
    assert not [broker for broker in _begun if broker.unexpected != broker.faults]
    _begun.clear()


def forget_brokers() -> None:
    """Let go of the brokers of a simulated machine, and of their stores."""
    forget_stores()
    _begun.clear()


class BrokerUnderTest:
    """Everything but the loop; time stands still until the test moves ``clock.ms``.

    faults: how many requests are to fail for a fault of ours.
    """

    def __init__(
        self,
        folder: Path,
        config: BrokerConfig | None = None,
        clock: SetClock | None = None,
        pace: Pace | None = None,
        rights: OpenedAccess | None = None,
        **store: Any,
    ) -> None:
        self.faults = 0
        _begun.append(self)
        self.config = config or broker_config(folder)
        self.clock = clock or SetClock()
        self.store = new_store(self.config.store_path_root_dir, self.clock, **store)
        self.store.open()
        network = MemoryNetwork()
        listener = network.listen("127.0.0.1", 0)
        try:
            around = Surroundings(network, listener, Services(), pace or at_once(), rights=rights)
            self.core = build_core(self.config, self.store, around)
            assembly.add_features(self.core)
            self.store.recover(self.core.added.scans)
            self.services = assembly.connect(self.core)
            self.staging = self.part(Staging)
            self.staging.load()
            self.compaction = self.part(Compaction)
            self.compaction.load()
        except BaseException:  # the disk of a simulation
            self.store.abandon()
            raise
        core = self.core
        self.budget, self.changes, self.statistics = core.budget, core.changes, core.statistics
        self.directory, self.writer = core.directory, core.messages.writer
        self.topics, self.mappings, self.groups, self.offsets = core.tables
        self.client_requests, self.long_polling, self.consumers, self.producers, self.locks = (
            core.clients
        )
        self.peers, self.pull_watch = core.peers, core.pull_watch
        self.server, self.registry = core.serving.server, core.serving.registry
        self.schedule, self.timers = self.part(Schedule), self.part(Timers)
        self.transactions = self.part(Transactions)
        self.mapping_changes = self.part(StaticTopicChanges)
        self.traffic = self.part(StaticTraffic)
        # A channel in memory is not read, so nothing has to stop reading it.
        core.serving.frames.connect(self.registry, _read_on, self.transactions.write_ops)

    def part(self, kind: type[_T]) -> _T:
        """A feature's object of a type."""
        return part(self.core, kind)

    @property
    def tier(self) -> TieredStorage:
        return self.part(TieredStorage)

    @property
    def unexpected(self) -> int:
        """The number of requests that failed for a fault of ours; the log has the tracebacks."""
        return self.server.unexpected_errors

    def close(self) -> None:
        self.store.close()

    # -- requests ----------------------------------------------------------------------------------

    def take(self, frame: bytes, channel: MemoryChannel) -> None:
        """One frame of a client, handled as a batch of its own."""
        frames = self.core.serving.frames
        frames.handle(cast("ServerChannel", channel), FrameReader().feed(frame))
        frames.finish_turn()
        frames.replied()

    def ask(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: bytes = b"",
        channel: MemoryChannel | None = None,
    ) -> Answer:
        """The answer to one request; what else was written to the channel is dropped."""
        channel = channel or MemoryChannel()
        try:
            self.send(code, header, body, channel)
        except BaseException:
            channel.replies()  # a turn that fails ends the server, and no client gets its answers
            raise
        (answer,) = (Answer(*reply) for reply in channel.replies() if reply[0].is_response)
        return answer

    def send(
        self, code: int, header: msgspec.Struct | None, body: bytes = b"", channel: Any = None
    ) -> None:
        """One request; the answer, if any, is written to the channel."""
        frame = encode_frame(
            SerializeType.JSON,
            code,
            7,
            version=VERSION,
            fields=header_fields(header),
            body_bytes=len(body),
        )
        self.take(frame + body, channel)

    def send_at_once(
        self, *all_properties: str, topic: str = "T", body: bytes = b"body", **fields: Any
    ) -> list[tuple[int, str]]:
        """Codes and remarks of the answers to messages that a client sends at once, to queue 1."""
        frames = b""
        for opaque, properties in enumerate(all_properties):
            ext = {"a": "g", "b": topic, "c": "TBW102", "d": 4, "e": 1, "f": 0, "g": 1, "h": 0}
            frame = encode_frame(
                SerializeType.JSON,
                RequestCode.SEND_MESSAGE_V2,
                opaque,
                fields={**ext, "i": properties, **fields},
                body_bytes=len(body),
            )
            frames += frame + body
        channel = MemoryChannel()
        channel.is_greeted = True
        self.take(frames, channel)
        answers = sorted((reply for reply, _ in channel.replies()), key=lambda reply: reply.opaque)
        return [(reply.code, reply.remark or "") for reply in answers]

    # -- what is there -----------------------------------------------------------------------------

    def create_topic(self, name: str, queue_nums: int = 2, **fields: Any) -> TopicConfig:
        topic = TopicConfig(
            topic_name=name, read_queue_nums=queue_nums, write_queue_nums=queue_nums, **fields
        )
        self.topics.put(topic)
        return topic

    def store_message(
        self, topic: str, queue_id: int, body: bytes = b"body", **properties: Any
    ) -> int:
        """Store a message at the clock's time, which then moves on by 1 s."""
        physical_offset = put(self.store, self.store.queue(topic, queue_id), body, **properties)
        self.clock.ms += 1000
        return physical_offset

    def stored(self, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
        """The messages of a queue of the store, for any reader."""
        return read_all(self.store, self.store.queue(topic, queue_id))

    def join(
        self, group: str, client_id: str, *topics: str, channel: MemoryChannel | None = None
    ) -> MemoryChannel:
        """A client sends a heartbeat as member of a group."""
        channel = channel or MemoryChannel()
        answer = self.ask(
            RequestCode.HEART_BEAT, body=heartbeat(group, client_id, *topics), channel=channel
        )
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        return channel


def broker_config(folder: Path, **settings: Any) -> BrokerConfig:
    """Messages stay, however full the disk of the machine is, unless the settings say otherwise."""
    settings = {"clean_file_forcibly_enable": False} | settings
    return BrokerConfig(broker_name="broker-a", store_path_root_dir=folder / "store", **settings)


def heartbeat(group: str, client_id: str, *topics: str, version: int = 1) -> bytes:
    subscriptions = [
        SubscriptionData(topic=topic, sub_string="*", sub_version=version) for topic in topics
    ]
    return HeartbeatData(
        client_id=client_id,
        consumer_data_set=[ConsumerData(group_name=group, subscription_data_set=subscriptions)],
    ).encode()
