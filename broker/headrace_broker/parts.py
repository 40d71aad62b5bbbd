"""The parts of a broker, and the means to keep its loop responsive; ``assembly`` creates them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace_daemon.slices import Fetches, SlicedWork
from headrace_protocol.serving import TURN_S

if TYPE_CHECKING:
    from headrace_broker.compaction.service import Compaction
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ConsumerManager, ProducerManager
    from headrace_broker.consumer.locks import QueueLocks
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.pull_watch import PullWatch
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.frame_loop import FrameLoop
    from headrace_broker.host_budget import HostBudget
    from headrace_broker.peers.peers import Peers
    from headrace_broker.queue_directory import QueueDirectory
    from headrace_broker.registration import Registration
    from headrace_broker.retry.dead_letters import DeadLetters
    from headrace_broker.staging.service import Staging
    from headrace_broker.static_topics import StaticTopics
    from headrace_broker.statictopic.changes import StaticTopicChanges
    from headrace_broker.statictopic.fence import Fence
    from headrace_broker.statictopic.undecided import UndecidedQueues
    from headrace_broker.statistics import BrokerStatistics
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.tiered.access.tiered_storage import TieredStorage
    from headrace_broker.topics.table import TopicTable
    from headrace_broker.waiting_services import WaitingServices
    from headrace_daemon.host_log import HostLog
    from headrace_daemon.metrics.scrapes import Scrapes
    from headrace_daemon.network import Listener, Network
    from headrace_daemon.services import Services
    from headrace_daemon.serving.client_requests import ClientRequests
    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.watchdog import Watchdog
    from headrace_protocol.serving import Registry


class Processor(Protocol):
    """Serves a group of request codes."""

    def register(self, registry: Registry) -> None:
        """Route the requests to this processor."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The means to keep the loop responsive: slices, work for threads, and clients' turns.

    turn_s: how long one client is served before the others get their turn, in seconds.
    """

    sliced_work: SlicedWork = field(default_factory=SlicedWork)
    fetches: Fetches = field(default_factory=Fetches)
    turn_s: float = TURN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a broker, except its processors.

    changes: logs the changes that clients make. tier: None without tiered storage.
    scrapes: None without a monitor.
    """

    config: BrokerConfig
    store: MessageStore
    network: Network
    listener: Listener
    supervisor: Services
    pace: Pace
    watchdog: Watchdog
    statistics: BrokerStatistics
    changes: HostLog
    budget: HostBudget
    topics: TopicTable
    peers: Peers
    fence: Fence
    undecided: UndecidedQueues
    mapping_changes: StaticTopicChanges
    static: StaticTopics
    compaction: Compaction
    tier: TieredStorage | None
    directory: QueueDirectory
    groups: SubscriptionGroups
    offsets: ConsumerOffsets
    consumers: ConsumerManager
    producers: ProducerManager
    pull_watch: PullWatch
    locks: QueueLocks
    long_polling: LongPolling
    client_requests: ClientRequests
    staging: Staging
    waiting: WaitingServices
    dead_letters: DeadLetters
    registration: Registration
    frames: FrameLoop
    server: RemotingServer
    registry: Registry
    scrapes: Scrapes | None
