"""Mappings of static topics: they outlive their brokers, and end with their topics."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headrace_nameserver.departed import Limits
from headrace_nameserver.routes import RouteTable
from headrace_protocol.bodies import TopicRouteData
from headrace_protocol.bounds import OutOfBounds
from headrace_protocol.codes import RequestCode
from headrace_protocol.nameserver_headers import GetRouteInfoHeader
from headrace_protocol.registration import RegisterBrokerBody
from headrace_protocol.statictopic.mapping import MappingInfo
from tests.support.channel import MemoryChannel
from tests.support.nameserver import (
    NameServerUnderTest,
    broker_topics,
    register_body,
    register_header,
)


def info(
    broker: str, queues: Iterable[int] = (), *, topic: str = "T", epoch: int = 1
) -> MappingInfo:
    """A mapping in which ``broker`` leads ``queues`` of four."""
    ids = {queue: number for number, queue in enumerate(queues)}
    return MappingInfo(topic=topic, bname=broker, total_queues=4, epoch=epoch, curr_id_map=ids)


def body(
    *topics: str, mappings: Iterable[MappingInfo] = (), version: int = 1
) -> RegisterBrokerBody:
    made = register_body(*topics, version=version)
    made.topic_config_serialize_wrapper.topic_queue_mapping_info_map = {
        mapping.topic: mapping for mapping in mappings
    }
    return made


class Cluster:
    """A table with brokers that register by name."""

    def __init__(self) -> None:
        self.table = RouteTable()
        self.channels: dict[str, MemoryChannel] = {}

    def register(
        self, broker: str, registration: RegisterBrokerBody, *, cluster: str = "c0"
    ) -> None:
        header = register_header(broker, address=f"{broker}:1", cluster_name=cluster)
        channel = self.channels.setdefault(broker, MemoryChannel())
        self.table.register(header, broker_topics(header, registration), channel, 0)

    def stop(self, broker: str) -> None:
        self.table.close_channel(self.channels[broker], 0)

    def mappings(self, topic: str = "T") -> dict[str, MappingInfo] | None:
        route = self.table.route(topic)
        assert route is not None
        return route.topic_queue_mapping_by_broker

    def has_queues(self, broker: str, topic: str = "T") -> bool:
        route = self.table.route(topic)
        return route is not None and any(q.broker_name == broker for q in route.queue_datas)


@pytest.fixture
def cluster() -> Cluster:
    """b0 leads all queues of T, b1 none."""
    cluster = Cluster()
    cluster.register("b0", body("b0", "T", mappings=[info("b0", range(4))]))
    cluster.register("b1", body("b1", "T", mappings=[info("b1")]))
    return cluster


def test_a_mapping_stays_while_its_broker_is_away(cluster: Cluster) -> None:
    both = {"b0": info("b0", range(4)), "b1": info("b1")}
    assert cluster.mappings() == both
    cluster.stop("b0")
    assert cluster.mappings() == both
    assert not cluster.has_queues("b0")
    cluster.register("b0", body("b0", "T", mappings=[info("b0", [3], epoch=2)]))
    assert cluster.mappings() == {"b0": info("b0", [3], epoch=2), "b1": info("b1")}


def test_a_topic_whose_leaders_are_silent_is_not_like_an_unknown_one() -> None:
    server = NameServerUnderTest()
    cluster = Cluster()
    cluster.table = server.table
    cluster.register("b0", body("b0", "T", mappings=[info("b0", range(4))]))
    cluster.register("b1", body("b1", "T", mappings=[info("b1")]))
    cluster.stop("b0")
    server.now_ms += 60_000

    def ask(topic: str) -> tuple[int, bytes]:
        header = GetRouteInfoHeader(topic=topic, accept_standard_json_only=True)
        command, data = server.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        return command.code, bytes(data)

    code, data = ask("T")
    assert code == 0
    route = TopicRouteData.decode(data)
    assert [broker.broker_name for broker in route.broker_datas] == ["b1"]
    assert route.topic_queue_mapping_by_broker is not None
    assert set(route.topic_queue_mapping_by_broker["b0"].curr_id_map) == {0, 1, 2, 3}
    assert ask("U") == (17, b"")


def test_a_deleted_topic_takes_the_mappings_of_brokers_that_are_away(cluster: Cluster) -> None:
    cluster.stop("b0")
    cluster.table.delete_topic("T")
    cluster.register("b1", body("b1", "T", version=2))
    assert cluster.mappings() is None
    cluster.register("b0", body("b0", "U"))
    assert cluster.mappings() is None


def test_a_cluster_keeps_its_mappings_when_another_deletes_the_topic(cluster: Cluster) -> None:
    cluster.register("d0", body("d0", "T", mappings=[info("d0")]), cluster="c1")
    cluster.stop("b0")
    cluster.table.delete_topic("T", "c1")
    assert cluster.mappings() == {"b0": info("b0", range(4)), "b1": info("b1")}


def test_a_registration_of_all_topics_ends_a_static_topic(cluster: Cluster) -> None:
    cluster.register("b0", body("b0", "U", version=2))
    assert cluster.mappings() == {"b1": info("b1")}
    assert not cluster.has_queues("b0")  # without a mapping they would look plain
    assert cluster.has_queues("b1")
    cluster.register("b1", body("b1", "U", version=2))
    assert cluster.table.route("T") is None


def test_also_the_registration_of_a_broker_that_comes_back(cluster: Cluster) -> None:
    cluster.stop("b0")
    cluster.register("b0", body("b0", "U"))
    assert cluster.mappings() == {"b1": info("b1")}


def test_a_change_of_some_topics_keeps_the_mappings_of_others(cluster: Cluster) -> None:
    cluster.register("b0", body("U", version=2))
    cluster.register("b0", body("V", "W", version=3))
    assert cluster.mappings() == {"b0": info("b0", range(4)), "b1": info("b1")}
    assert cluster.has_queues("b0")


def test_a_topic_registered_without_a_mapping_is_plain(cluster: Cluster) -> None:
    cluster.register("b0", body("T", version=2))
    assert cluster.mappings() == {"b1": info("b1")}
    assert cluster.has_queues("b0")


def test_mappings_of_brokers_away_do_not_make_a_plain_topic_static(cluster: Cluster) -> None:
    cluster.stop("b0")
    cluster.register("b1", body("b1", "T", version=2))
    assert cluster.mappings() is None


def test_mappings_of_brokers_away_are_limited_by_host() -> None:
    cluster = Cluster()
    away = cluster.table.departed
    away.limits = Limits(departed_size_of_host=11, departed_size=18)
    for name, host in (("x", "1.1.1.1"), ("a", "6.6.6.6"), ("b", "6.6.6.6"), ("y", "2.2.2.2")):
        cluster.channels[name] = MemoryChannel()
        cluster.channels[name].address = f"{host}:1"
        count = 4 if host == "6.6.6.6" else 1
        cluster.register(name, body(name, "T", mappings=[info(name, range(count))]))
    cluster.register("live", body("live", "T", mappings=[info("live")]))

    def kept() -> list[str]:
        return sorted(set(cluster.mappings() or {}) - {"live"})

    cluster.stop("x")
    cluster.stop("a")
    cluster.stop("b")
    assert kept() == ["b", "x", "y"]  # one host's limit costs no other host anything
    cluster.stop("y")
    assert kept() == ["b", "x", "y"]
    away.limits = Limits(departed_size_of_host=11, departed_size=11)
    cluster.register("y", body("y", "T", mappings=[info("y", [0])]))
    cluster.stop("y")
    assert kept() == ["b", "y"]  # the one that is away for longest goes first


def test_kept_mappings_count_when_their_broker_comes_back(cluster: Cluster) -> None:
    cluster.table.limits = Limits(size=6)
    cluster.stop("b0")
    more = body("U", "V", mappings=[info("b0", [0], topic="U")])
    with pytest.raises(OutOfBounds, match="mapped queues"):
        cluster.register("b0", more)
    assert cluster.mappings() == {"b0": info("b0", range(4)), "b1": info("b1")}
