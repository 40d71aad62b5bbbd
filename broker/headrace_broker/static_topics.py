"""The requests of static topics, put together: what they share is made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.statictopic.close import wake_held
from headrace_broker.statictopic.deliver import Deliveries
from headrace_broker.statictopic.forward import Forwarding
from headrace_broker.statictopic.founders import Founders
from headrace_broker.statictopic.groups import StaticGroups
from headrace_broker.statictopic.key_lookups import StaticKeyLookups
from headrace_broker.statictopic.leaders import Leaders
from headrace_broker.statictopic.locks import StaticLocks
from headrace_broker.statictopic.places import StaticPlaces
from headrace_broker.statictopic.progress import StaticProgress
from headrace_broker.statictopic.reader import StaticReader
from headrace_broker.statictopic.relay import Relay
from headrace_broker.statictopic.requests import StaticRequests
from headrace_broker.statictopic.work import Workers

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_broker.consumer.groups import ConsumerManager
    from headrace_broker.consumer.long_polling import LongPolling
    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.consumer.subscriptions import SubscriptionGroups
    from headrace_broker.peers.nameservers import Nameservers
    from headrace_broker.peers.peers import Peers
    from headrace_broker.statictopic.table import MappingTable
    from headrace_broker.store.message_store import MessageStore
    from headrace_protocol.serving import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTopics:
    """What serves the requests of static topics."""

    mappings: MappingTable
    founders: Founders
    forwarding: Forwarding
    relay: Relay
    deliveries: Deliveries
    places: StaticPlaces
    requests: StaticRequests
    workers: Workers
    locks: StaticLocks
    groups: StaticGroups
    key_lookups: StaticKeyLookups

    def connect(self, registry: Registry) -> None:
        """Connect the parts that serve requests again; after all processors are registered."""
        self.forwarding.registry = self.relay.registry = self.workers.registry = registry
        self.requests.add_to(registry)
        self.locks.add_to(registry)
        self.groups.add_to(registry)
        self.key_lookups.add_to(registry)

    def runtime_info(self) -> dict[str, str]:
        """Counters for GET_BROKER_RUNTIME_INFO."""
        return {
            "staticQueueRemoteReads": str(self.relay.relayed_count),
            "staticQueueRemoteBytes": str(self.relay.relayed_bytes),
            "staticQueueForwardedRequests": str(self.forwarding.forwarded_count),
        }


def static_topics(
    config: BrokerConfig,
    peers: Peers,
    nameservers: Nameservers,
    mappings: MappingTable,
    store: MessageStore,
    offsets: ConsumerOffsets,
    groups: SubscriptionGroups,
    consumers: ConsumerManager,
    long_polling: LongPolling,
) -> StaticTopics:
    """All of them."""

    def timeout_ms() -> int:
        return config.forward_timeout

    def subscription(group: str, topic: str, version: int) -> str:
        return consumers.subscription_for_pull(group, topic, version).sub_string

    forwarding = Forwarding(peers, nameservers.find_infos, subscription, timeout_ms)
    relay = Relay(peers, subscription)
    leaders = Leaders(mappings, peers.known_address, forwarding.pass_on)
    forwarding.leaders = leaders
    progress = StaticProgress(offsets, leaders, peers)
    workers = Workers(config.broker_name, peers)
    make_reader = partial(StaticReader, leaders, relay)
    return StaticTopics(
        mappings=mappings,
        founders=Founders(config.broker_name, nameservers.find_infos, peers),
        forwarding=forwarding,
        relay=relay,
        deliveries=Deliveries(leaders, peers),
        places=StaticPlaces(leaders, make_reader, progress),
        requests=StaticRequests(leaders, workers, progress),
        workers=workers,
        locks=StaticLocks(leaders, workers, store.clock.steady_ms),
        groups=StaticGroups(
            leaders,
            workers,
            progress,
            groups,
            consumers,
            offsets,
            lambda: config.use_server_side_reset_offset,
            partial(wake_held, store, long_polling),
        ),
        key_lookups=StaticKeyLookups(leaders, workers),
    )
