"""By default nobody outside reaches a daemon, and ``read`` lets nobody administer it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.access import ADMINISTRATIVE
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.broker import BrokerUnderTest
from tests.support.cli import headrace
from tests.support.nameserver import NameServerUnderTest
from tests.support.wire import ask

OUTSIDE = ["0.0.0.0", "::", "192.0.2.7", "2001:db8::7", "broker.example"]
DAEMONS = ["broker", "nameserver"]

# Codes that anonymousAccess=read permits. A new code must be added here or be refused.
OPEN = {
    "messages": "BULK_PULL BULK_SEND CONSUMER_SEND_MSG_BACK END_TRANSACTION LITE_PULL_MESSAGE"
    " PULL_MESSAGE QUERY_MESSAGE RECALL_MESSAGE SEND_BATCH_MESSAGE SEND_MESSAGE SEND_MESSAGE_V2"
    " GET_BY_KEY STAGE_ABORT STAGE_COMMIT"
    " STAGE_DECIDE STAGE_FORGET STAGE_SEAL STAGE_SEND STAGE_STATE VIEW_MESSAGE_BY_ID",
    "offsets": "CLONE_GROUP_OFFSET INVOKE_BROKER_TO_RESET_OFFSET QUERY_CONSUMER_OFFSET"
    " UPDATE_CONSUMER_OFFSET",
    "membership": "CHECK_CLIENT_CONFIG GET_CONSUMER_LIST_BY_GROUP HEART_BEAT LOCK_BATCH_MQ"
    " UNLOCK_BATCH_MQ UNREGISTER_CLIENT",
    "brokers that register": "BROKER_HEARTBEAT REGISTER_BROKER UNREGISTER_BROKER",
    "lookups": "GET_ALL_CONSUMER_OFFSET GET_ALL_DELAY_OFFSET GET_ALL_SUBSCRIPTIONGROUP_CONFIG"
    " GET_ALL_TOPIC_CONFIG"
    " GET_ALL_TOPIC_LIST_FROM_NAMESERVER GET_BROKER_CLUSTER_INFO GET_BROKER_CONFIG"
    " GET_BROKER_MEMBER_GROUP GET_BROKER_RUNTIME_INFO GET_CONSUME_STATS"
    " GET_CONSUMER_CONNECTION_LIST GET_CONSUMER_RUNNING_INFO DESCRIBE_GROUP"
    " GET_EARLIEST_MSG_STORETIME GET_HAS_UNIT_SUB_TOPIC_LIST"
    " GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST GET_KVLIST_BY_NAMESPACE GET_KV_CONFIG GET_MAX_OFFSET"
    " GET_MIN_OFFSET GET_PRODUCER_CONNECTION_LIST GET_ROUTEINFO_BY_TOPIC"
    " GET_SYSTEM_TOPIC_LIST_FROM_NS GET_TIMER_CHECK_POINT GET_TIMER_METRICS"
    " GET_TOPICS_BY_CLUSTER GET_TOPIC_CONFIG GET_TOPIC_STATS_INFO"
    " GET_UNIT_TOPIC_LIST LIST_TIMERS LIST_TRANSACTIONS QUERY_CONSUME_QUEUE"
    " QUERY_CONSUME_TIME_SPAN QUERY_DATA_VERSION"
    " QUERY_TOPIC_CONSUME_BY_WHO SEARCH_OFFSET_BY_TIMESTAMP TIER_PLAN TIER_STATUS",
}


def settings(daemon: str, folder: Path, *lines: str) -> Path:
    path = folder / f"{daemon}.conf"
    store = [f"storePathRootDir={folder}/store"] if daemon == "broker" else []
    path.write_text("\n".join([*lines, *store]))
    return path


def test_daemons_listen_on_loopback_by_default(tmp_path: Path) -> None:
    assert BrokerConfig(store_path_root_dir=tmp_path).bind_address == "127.0.0.1"
    assert NameServerConfig().bind_address == "127.0.0.1"


@pytest.mark.parametrize("daemon", DAEMONS)
@pytest.mark.parametrize("address", OUTSIDE)
def test_serving_other_machines_needs_consent(tmp_path: Path, daemon: str, address: str) -> None:
    path = settings(daemon, tmp_path, "", f"bindAddress={address}")
    outcome = headrace(daemon, "-c", str(path), "--check-config")
    assert outcome.exit_code == 2
    assert f"{path}:2: bindAddress={address}: other machines reach this address" in outcome.stderr
    assert "anonymousAccess=allow" in outcome.stderr


@pytest.mark.parametrize("daemon", DAEMONS)
@pytest.mark.parametrize(
    "lines",
    [
        ("bindAddress=0.0.0.0", "anonymousAccess=allow"),
        ("anonymousAccess=read", "bindAddress=0.0.0.0"),
        ("bindAddress=127.0.0.2",),
        ("bindAddress=::1",),
        ("bindAddress=localhost",),
    ],
)
def test_consent_is_enough_and_loopback_needs_none(
    tmp_path: Path, daemon: str, lines: tuple[str, ...]
) -> None:
    outcome = headrace(daemon, "-c", str(settings(daemon, tmp_path, *lines)), "--check-config")
    assert outcome.exit_code == 0
    assert "valid" in outcome.stderr.splitlines()[-1]


# RFC 5737 and RFC 2606 reserve address and name.
CANNOT_LISTEN: dict[tuple[str, ...], str] = {
    ("bindAddress=192.0.2.7", "anonymousAccess=allow"): "no interface of this machine has that",
    ("bindAddress=nowhere.invalid", "anonymousAccess=allow"): "can't listen on nowhere.invalid",
    ("listenPort=9999", "monitorPort=9999"): "monitorPort=9999: listenPort is the same port",
}


@pytest.mark.parametrize("daemon", DAEMONS)
@pytest.mark.parametrize("lines", CANNOT_LISTEN)
def test_an_address_that_a_start_could_not_take_is_found_by_the_check(
    tmp_path: Path, daemon: str, lines: tuple[str, ...]
) -> None:
    outcome = headrace(daemon, "-c", str(settings(daemon, tmp_path, *lines)), "--check-config")
    assert outcome.exit_code == 2
    assert CANNOT_LISTEN[lines] in outcome.stderr


@pytest.mark.parametrize("daemon", DAEMONS)
def test_the_check_passes_beside_the_running_daemon(tmp_path: Path, daemon: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as running:
        lines = (f"listenPort={running.getsockname()[1]}",)
        outcome = headrace(daemon, "-c", str(settings(daemon, tmp_path, *lines)), "--check-config")
    assert outcome.exit_code == 0, outcome.stderr


def test_an_option_may_not_name_the_monitors_port(tmp_path: Path) -> None:
    path = settings("nameserver", tmp_path, "monitorPort=9999")
    outcome = headrace("nameserver", "-c", str(path), "--port", "9999", "--check-config")
    assert outcome.exit_code == 2
    assert "monitorPort=9999: listenPort is the same port" in outcome.stderr


def test_an_advertised_address_must_be_listened_on(tmp_path: Path) -> None:
    path = settings("broker", tmp_path, "brokerIP1=192.0.2.7")
    outcome = headrace("broker", "-c", str(path), "--check-config")
    assert outcome.exit_code == 2
    assert f"{path}:1: brokerIP1=192.0.2.7: the broker advertises this address" in outcome.stderr
    assert "bindAddress=127.0.0.1" in outcome.stderr


async def test_read_rejects_administration(tmp_path: Path) -> None:
    network = MemoryNetwork()
    root = tmp_path / "store"
    broker = Broker(BrokerConfig(store_path_root_dir=root, anonymous_access="read"), network)
    nameserver = NameServer(NameServerConfig(anonymous_access="read"), network)
    async with trio.open_nursery() as nursery:
        for daemon, change, lookup in (
            (broker, RequestCode.UPDATE_BROKER_CONFIG, RequestCode.GET_BROKER_CONFIG),
            (nameserver, RequestCode.PUT_KV_CONFIG, RequestCode.GET_BROKER_CLUSTER_INFO),
        ):
            address = await nursery.start(daemon.run)
            refusal = (await ask(network, address, change)).command
            assert refusal.code == ResponseCode.NO_PERMISSION
            assert f"{change.name} is rejected: this daemon runs with anonymousAccess=read" in (
                refusal.remark or ""
            )
            assert (await ask(network, address, lookup)).command.code == ResponseCode.SUCCESS
        nursery.cancel_scope.cancel()


async def test_everybody_administers_on_loopback(tmp_path: Path) -> None:
    network = MemoryNetwork()
    broker = Broker(BrokerConfig(store_path_root_dir=tmp_path / "store"), network)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(broker.run)
        answer = await ask(network, address, RequestCode.TRIGGER_DELETE_FILES)
        assert answer.command.code == ResponseCode.SUCCESS
        nursery.cancel_scope.cancel()


def test_every_code_is_either_open_or_administration(tmp_path: Path) -> None:
    broker, nameserver = BrokerUnderTest(tmp_path), NameServerUnderTest()
    open_codes = {RequestCode[name] for names in OPEN.values() for name in names.split()}
    assert open_codes.isdisjoint(ADMINISTRATIVE)
    served = {*broker.registry.functions, *nameserver.registry.functions}
    assert served == open_codes | ADMINISTRATIVE
