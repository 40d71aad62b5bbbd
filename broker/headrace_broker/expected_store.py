"""A store that should be there: with its disk unmounted, a broker must not begin an empty one.

Looked for before the store is opened, so that nothing is created below the mount.
Source: docs/operations.md "A store that is not there"; tests/broker/test_expected_store.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from headrace_broker.config import ConfigError
from headrace_broker.peers.connect import connected
from headrace_broker.store.errors import StoreMissing
from headrace_protocol.bodies import ClusterInfo
from headrace_protocol.codes import RequestCode
from headrace_protocol.departed import ClusterInfoHeader
from headrace_protocol.drivers.errors import HeadraceError

if TYPE_CHECKING:
    from headrace_broker.config import BrokerConfig
    from headrace_daemon.network import Network
    from headrace_protocol.departed import DepartedBroker

log = structlog.get_logger("headrace.broker")

_TIMEOUT_S = 5.0
_TOPICS_NAMED_MAX = 3


def check_store(config: BrokerConfig) -> None:
    """Raise ConfigError if there should be a store and is none."""
    root = config.store_path_root_dir
    if config.expect_store and not _has_store(config):
        reason = "there is no store, and expectStore=true: mount its disk, or set expectStore=false"
        raise ConfigError([f"storePathRootDir={root}: {reason} to begin an empty one"])


async def check_never_left(config: BrokerConfig, network: Network) -> None:
    """Raise StoreMissing if there is no store, and a nameserver remembers this broker's topics.

    A nameserver that doesn't answer can't know; then an empty store begins, with a warning.
    """
    if _has_store(config):
        return
    missing: list[StoreMissing] = []

    async def look(nameserver: str) -> None:
        departed = await _departed(config, network, nameserver)
        if departed is not None and departed.topics:
            missing.append(_error(config, departed, nameserver))

    async with trio.open_nursery() as nursery:
        for nameserver in config.nameservers:
            nursery.start_soon(look, nameserver)
    if missing:
        raise missing[0]


def _has_store(config: BrokerConfig) -> bool:
    return (config.store_path_root_dir / "commitlog").is_dir()


async def _departed(
    config: BrokerConfig, network: Network, nameserver: str
) -> DepartedBroker | None:
    """This broker as a nameserver remembers it."""
    problem: object = f"no answer within {_TIMEOUT_S:g} s"
    with trio.move_on_after(_TIMEOUT_S):
        try:
            found = await _ask(network, nameserver)
        except HeadraceError as error:
            problem = error
        else:
            own = (config.broker_name, config.broker_cluster_name)
            same = (each for each in found if (each.broker_name, each.cluster) == own)
            return next(same, None)
    log.warning(
        "a new store begins, and a nameserver can't tell whether there was one",
        path=str(config.store_path_root_dir),
        nameserver=nameserver,
        reason=str(problem),
    )
    return None


async def _ask(network: Network, nameserver: str) -> list[DepartedBroker]:
    """All departed brokers; Apache RocketMQ's nameservers remember none."""
    async with connected(network.connect, nameserver) as connection:
        response = await connection.request(
            RequestCode.GET_BROKER_CLUSTER_INFO,
            ClusterInfoHeader(departed=True),
            timeout_ms=_TIMEOUT_S * 1000,
        )
    return response.expect().decode(ClusterInfo).departed_brokers or []


def _error(config: BrokerConfig, departed: DepartedBroker, nameserver: str) -> StoreMissing:
    topics = departed.topics or []
    named = ", ".join(topics[:_TOPICS_NAMED_MAX])
    more = ", ..." if len(topics) > _TOPICS_NAMED_MAX else ""
    return StoreMissing(
        config.store_path_root_dir,
        f"nameserver {nameserver} remembers broker {departed.broker_name} with topics "
        f"({named}{more}); it {departed.left}",
        f"headrace broker forget {departed.broker_name}",
    )
