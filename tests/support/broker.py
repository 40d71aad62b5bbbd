"""A broker without sockets and tasks: its tables, its store and its processors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from headrace_broker.config import BrokerConfig
from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
from headrace_broker.consumer.locks import QueueLocks
from headrace_broker.consumer.long_polling import LongPolling
from headrace_broker.consumer.offsets import ConsumerOffsets
from headrace_broker.consumer.subscriptions import SubscriptionGroups
from headrace_broker.host_budget import HostBudget
from headrace_broker.processors.admin_broker import AdminBrokerProcessor
from headrace_broker.processors.admin_groups import AdminGroupsProcessor
from headrace_broker.processors.admin_topics import AdminTopicsProcessor
from headrace_broker.processors.bulk import BulkProcessor
from headrace_broker.processors.client import ClientProcessor
from headrace_broker.processors.pull import PullProcessor
from headrace_broker.processors.query import QueryProcessor
from headrace_broker.processors.send import SendProcessor
from headrace_broker.processors.send_back import SendBackProcessor
from headrace_broker.processors.staging import StagingProcessor
from headrace_broker.staging.service import Staging
from headrace_broker.statistics import BrokerStatistics
from headrace_broker.store.config_file import ConfigFile
from headrace_broker.topics import TopicTable
from headrace_protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData, TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.command import VERSION, Command, header_fields
from headrace_protocol.drivers.host_log import HostLog
from headrace_protocol.frame import FrameReader
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.message import UniqKeyGenerator
from headrace_protocol.serving import Registry
from tests.support.channel import MemoryChannel
from tests.support.stores import SetClock, open_store, put

if TYPE_CHECKING:
    from pathlib import Path

    import msgspec

    from headrace_protocol.serving import Request


@dataclass
class Answer:
    """What a client gets."""

    command: Command
    body: bytes

    @property
    def code(self) -> int:
        return self.command.code

    @property
    def remark(self) -> str:
        return self.command.remark or ""


class BrokerUnderTest:
    """Everything but the loop; time stands still until the test moves ``clock.ms``."""

    def __init__(self, folder: Path, config: BrokerConfig | None = None, **store: Any) -> None:
        self.config = config or broker_config(folder)
        self.clock = SetClock()
        now_ms = self.clock.now_ms
        self.store = open_store(self.config.store_path_root_dir, self.clock, **store)
        files = self.config.store_path_root_dir / "config"
        self.budget = HostBudget()
        self.changes = HostLog(structlog.get_logger())
        topics_file = ConfigFile(files / "topics.json")
        self.topics = TopicTable(self.config, topics_file, now_ms, self.budget)
        groups_file = ConfigFile(files / "subscriptionGroup.json")
        self.groups = SubscriptionGroups(self.config, groups_file, now_ms, self.budget)
        offsets_file = ConfigFile(files / "consumerOffset.json")
        self.offsets = ConsumerOffsets(offsets_file, now_ms, self.budget)
        self.consumers = ConsumerManager(self.groups)
        self.producers = ProducerManager()
        self.locks = QueueLocks(self.budget)
        self.statistics = BrokerStatistics()
        self.long_polling = LongPolling()
        self.staging = Staging(
            self.store,
            self.config.broker_name,
            self.config.staged_reserved_ms,
            self.statistics.put,
            self.budget,
        )
        self.staging.load()
        self.unexpected: list[Exception] = []
        self.registry = Registry(self._fail)
        for processor in self._processors():
            processor.register(self.registry)

    def _fail(self, _request: Request, error: Exception) -> None:
        self.unexpected.append(error)

    def _processors(self) -> tuple[Any, ...]:
        now_ms = self.clock.now_ms
        config, store, topics, groups = self.config, self.store, self.topics, self.groups
        consumers, producers, offsets = self.consumers, self.producers, self.offsets
        statistics, long_polling = self.statistics, self.long_polling
        uniq_keys = UniqKeyGenerator(now_ms, 1, b"\x7f\x00\x00\x01")
        sends = SendProcessor(config, store, topics, uniq_keys, statistics)
        pulls = PullProcessor(
            config, store, topics, groups, consumers, offsets, long_polling, statistics
        )
        bulk = BulkProcessor(store, sends, pulls, statistics)
        return (
            sends,
            pulls,
            bulk,
            StagingProcessor(store, bulk, self.staging),
            SendBackProcessor(HostLog(structlog.get_logger())),
            QueryProcessor(store, topics),
            ClientProcessor(
                store, topics, groups, consumers, producers, offsets, self.locks, now_ms
            ),
            AdminTopicsProcessor(
                config,
                store,
                topics,
                offsets,
                long_polling,
                statistics,
                self.changes,
                lambda told: told(),
            ),
            AdminGroupsProcessor(
                config,
                store,
                topics,
                groups,
                consumers,
                producers,
                offsets,
                statistics,
                now_ms,
                self.changes,
            ),
            AdminBrokerProcessor(config, store, topics, offsets, statistics, now_ms, self.changes),
        )

    def close(self) -> None:
        self.store.close()

    # -- requests ----------------------------------------------------------------------------------

    def take(self, frame: bytes, channel: MemoryChannel) -> None:
        """One frame of a client, handled as a batch of its own."""
        self.store.begin_batch()
        self.registry.handle(channel, FrameReader().feed(frame))
        self.long_polling.arrived(self.store.dispatch())

    def ask(
        self,
        code: int,
        header: msgspec.Struct | None = None,
        body: bytes = b"",
        channel: MemoryChannel | None = None,
    ) -> Answer:
        """The answer to one request; what else was written to the channel is dropped."""
        channel = channel or MemoryChannel()
        self.send(code, header, body, channel)
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
    return BrokerConfig(broker_name="broker-a", store_path_root_dir=folder / "store", **settings)


def heartbeat(group: str, client_id: str, *topics: str, version: int = 1) -> bytes:
    subscriptions = [
        SubscriptionData(topic=topic, sub_string="*", sub_version=version) for topic in topics
    ]
    return HeartbeatData(
        client_id=client_id,
        consumer_data_set=[ConsumerData(group_name=group, subscription_data_set=subscriptions)],
    ).encode()
