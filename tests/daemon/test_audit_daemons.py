"""The audit logs of a whole broker and a whole nameserver, and starts that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from headrace import Admin
from headrace.errors import HeadraceError
from headrace_broker.config import ConfigError, validated
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import ConfigError as NameServerConfigError
from headrace_nameserver.config import NameServerConfig, load_config
from headrace_nameserver.server import NameServer
from tests.support.audit import checked, lines_of, names_of
from tests.support.running import running, small_config

NAMESERVER = "127.0.0.1:9876"


def daemons(folder: Path, network: MemoryNetwork, **names: str) -> tuple[NameServer, Broker]:
    """names: the files of their audit logs; none by default."""
    logs = {name: {"audit_log_path": str(folder / path)} for name, path in names.items()}
    nameserver: dict[str, Any] = logs.get("nameserver", {})
    broker: dict[str, Any] = logs.get("broker", {})
    return (
        NameServer(NameServerConfig(**nameserver), network),
        Broker(
            small_config(folder / "store", listen_port=0, namesrv_addr=NAMESERVER, **broker),
            network,
        ),
    )


def shown(path: Path) -> list[tuple[Any, ...]]:
    """Event, request, resources and outcome."""
    keys = ("event", "request", "resources", "outcome")
    return [
        tuple(tuple(value) if isinstance(value, list) else value for value in map(line.get, keys))
        for line in lines_of(path)
    ]


async def test_a_day_of_a_cluster(tmp_path: Path, autojump_clock: object) -> None:
    network = MemoryNetwork()
    nameserver, broker = daemons(tmp_path, network, nameserver="n.log", broker="b.log")
    with structlog.testing.capture_logs():
        async with running(nameserver.run):
            cluster = Admin(nameserver=NAMESERVER, connect=network.connect)
            async with running(broker.run), cluster as admin:
                await trio.sleep(2)
                await admin.create_topic("orders", queues=2)
                await admin.update_broker_config(broker.address, {"longPollingEnable": "false"})
                await admin.delete_topic("orders")
                await trio.sleep(100)  # registrations, heartbeats
            await trio.sleep(2)
    of_broker, of_nameserver = tmp_path / "b.log", tmp_path / "n.log"
    topic = ("Topic:orders",)
    assert shown(of_broker) == [
        ("daemon.started", None, (), None),
        ("request", "UPDATE_AND_CREATE_TOPIC", topic, "SUCCESS"),
        ("setting.changed", None, (), None),
        ("request", "UPDATE_BROKER_CONFIG", ("Cluster",), "SUCCESS"),
        ("request", "DELETE_TOPIC_IN_BROKER", topic, "SUCCESS"),
        ("daemon.stopped", None, (), None),
    ]
    setting = lines_of(of_broker)[2]["detail"]
    assert setting == {"setting": "longPollingEnable", "old": "true", "new": "false"}
    assert lines_of(of_broker)[0]["daemon"] == "broker/broker-a"
    assert shown(of_nameserver) == [
        ("daemon.started", None, (), None),
        ("broker.registered", None, (), None),
        ("request", "DELETE_TOPIC_IN_NAMESRV", ("Cluster",), "SUCCESS"),
        ("broker.unregistered", None, (), None),
        ("daemon.stopped", None, (), None),
    ]
    detail = lines_of(of_nameserver)[1]["detail"]
    assert (detail["broker"], detail["address"]) == ("broker-a", broker.address)
    assert lines_of(of_nameserver)[2]["detail"] == {"topic": "orders"}
    assert lines_of(of_nameserver)[0]["daemon"] == f"nameserver/{NAMESERVER}"
    assert checked(of_broker).problem is checked(of_nameserver).problem is None


async def test_users_of_a_broker_are_recorded(tmp_path: Path, autojump_clock: object) -> None:
    network, path = MemoryNetwork(), tmp_path / "b.log"
    nameserver, _ = daemons(tmp_path, network)
    config = small_config(
        tmp_path / "store",
        listen_port=0,
        namesrv_addr=NAMESERVER,
        audit_log_path=str(path),
        authentication_enabled=True,
        authorization_enabled=True,
        init_authentication_user='{"username": "root", "password": "of-root"}',
        auth_requires_tls="none",
    )
    broker = Broker(config, network)
    nobody = Admin(nameserver=NAMESERVER, connect=network.connect)
    root = Admin(nameserver=NAMESERVER, connect=network.connect, user="root", password="of-root")
    with structlog.testing.capture_logs():
        async with running(nameserver.run, broker.run):
            async with nobody:
                with pytest.raises(HeadraceError):
                    await nobody.create_topic("orders")
            async with root:
                await root.create_topic("orders")
            await trio.sleep(2)
    found = [(line["event"], line["user"], line["outcome"]) for line in lines_of(path)]
    assert set(found) == {
        ("daemon.started", None, None),
        ("denied", None, "NO_PERMISSION"),  # what it asks before it creates a topic
        ("login", "root", None),
        ("request", "root", "SUCCESS"),
        ("daemon.stopped", None, None),
    }
    assert "of-root" not in path.read_text()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_without_a_setting_there_is_no_audit_log(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    nameserver, broker = daemons(tmp_path, network)
    with structlog.testing.capture_logs():
        async with running(nameserver.run, broker.run):
            await trio.sleep(1)
    assert names_in(tmp_path) == ["store"]


async def test_two_daemons_do_not_start_with_one_log(
    tmp_path: Path, autojump_clock: object
) -> None:
    network = MemoryNetwork()
    nameserver, broker = daemons(tmp_path, network, nameserver="a.log", broker="a.log")
    refused = pytest.RaisesExc(OSError, match="another daemon writes this audit log: give each")
    with structlog.testing.capture_logs():
        async with running(nameserver.run):
            with pytest.RaisesGroup(refused, flatten_subgroups=True):
                async with running(broker.run):
                    pass
            # Nothing is left open: with another log, it starts.
            _, again = daemons(tmp_path, network, broker="b.log")
            async with running(again.run):
                pass
    assert set(names_of(tmp_path / "b.log")) == {"daemon.started", "daemon.stopped"}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no/such/audit.log", "does not exist: create it first"),
        (".", "is a directory: name a file"),
    ],
)
def test_a_path_that_can_not_be_is_named(tmp_path: Path, path: str, reason: str) -> None:
    place = tmp_path / path
    config = validated({"auditLogPath": str(place)}, {})
    with pytest.raises(ConfigError, match=f"auditLogPath={place}: .*{reason}"):
        config.check_paths()
    file = tmp_path / "namesrv.conf"
    file.write_text(f"\nauditLogPath={place}\n")
    with pytest.raises(NameServerConfigError, match=f"namesrv.conf:2: auditLogPath.*{reason}"):
        load_config(file)


@pytest.mark.parametrize("line", ["auditOnFailure=stop", "auditLogBytesMax=1"])
def test_a_wrong_setting_is_named(tmp_path: Path, line: str) -> None:
    key, _, value = line.partition("=")
    with pytest.raises(ConfigError, match=key):
        validated({key: value}, {key: "broker.conf:1"})
    file = tmp_path / "namesrv.conf"
    file.write_text(f"{line}\n")
    with pytest.raises(NameServerConfigError, match=f"namesrv.conf:1: {key}"):
        load_config(file)
