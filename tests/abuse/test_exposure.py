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
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.cli import headrace
from tests.support.wire import ask

OUTSIDE = ["0.0.0.0", "::", "192.0.2.7", "2001:db8::7", "broker.example"]
DAEMONS = ["broker", "nameserver"]


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
        for daemon, change, lookup, reason in (
            (
                broker,
                RequestCode.UPDATE_BROKER_CONFIG,
                RequestCode.GET_BROKER_CONFIG,
                "User:anonymous has no permission to access Cluster:DefaultCluster",
            ),
            (
                nameserver,
                RequestCode.PUT_KV_CONFIG,
                RequestCode.GET_BROKER_CLUSTER_INFO,
                "User:anonymous has no permission to access Cluster:nameserver",
            ),
        ):
            address = await nursery.start(daemon.run)
            refusal = (await ask(network, address, change)).command
            assert refusal.code == ResponseCode.NO_PERMISSION
            assert reason in (refusal.remark or "")
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
