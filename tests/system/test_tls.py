"""A cluster with TLS as its users set it up: certificates, settings, contexts, clients."""

from __future__ import annotations

import json
import pickle
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import anyio
import pytest
import trio
from cryptography import x509

import headrace
from headrace import blocking
from headrace.admin.commands.doctor import diagnose
from headrace.errors import ConfigurationError, NameserverUnavailable, TlsFailed
from headrace.spark.cluster import Cluster
from headrace.spark.connections import Connections
from headrace.spark.options import read_options
from headrace.values import now_ms
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.tls.settings import ClientTls
from tests.support.certificates import Authority
from tests.support.cluster import Daemon
from tests.support.processes import run
from tests.support.secured import Secured
from tests.support.until import wait_until


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with Secured(tmp_path_factory.mktemp("tls")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A cluster whose broker's certificate has its name, and no address."""
    cluster = Secured(tmp_path_factory.mktemp("named"))
    cluster.command("cert", "issue", "named", "broker-a.DefaultCluster")
    for file, old, new in (
        ("tls.properties", "/server.", "/named."),
        ("broker.conf", "=tls.properties", "=named.properties"),
    ):
        text = (cluster.folder / file).read_text().replace(old, new)
        (cluster.folder / file.replace("tls", "named")).write_text(text)
    with cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_clients_accept_a_certificate_with_the_brokers_name(named: Secured, backend: str) -> None:
    async def main() -> None:
        async with headrace.Admin(**named.at) as admin:
            await admin.create_topic(f"T_{backend}", queues=2)
            assert [node.broker_name for node in await admin.cluster()] == ["broker-a"]
        async with headrace.Producer(**named.at) as producer:
            await producer.send(headrace.Message(f"T_{backend}", b"x"))

    anyio.run(main, backend=backend)


@pytest.mark.slow
def test_commands_and_tasks_accept_a_certificate_with_the_brokers_name(named: Secured) -> None:
    named.command("context", "add", "lab", named.nameserver, "--ca-file", named.ca_file)
    named.command("context", "use", "lab")
    assert named.command("send", "Lab", "x").returncode == 0
    doctor = named.command("doctor", "--json")
    assert [row["problem"] for row in json.loads(doctor.stdout)] == [None, None]
    dial = read_options(
        {"topic": "Lab", "nameserver": named.nameserver, "caFile": named.ca_file}
    ).dial
    with Cluster([named.nameserver], dial) as cluster:
        assert cluster.masters().keys() == {"broker-a"}
        [address] = cluster.masters().values()
        cluster.open(address)
    with Connections(pickle.loads(pickle.dumps(dial))) as task:
        task.open(address)
    with (
        Connections(dial._replace(names=ServerNames())) as stranger,
        pytest.raises(TlsFailed, match=r"not for 127\.0\.0\.1: connect by a name"),
    ):
        stranger.open(address)


@pytest.fixture
def other(named: Secured) -> Iterator[Daemon]:
    """Another broker of the cluster, whose certificate has its own name."""
    named.command("cert", "issue", "other", "broker-b.DefaultCluster")
    for file, copy, changes in (
        ("named.properties", "other.properties", {"/named.": "/other."}),
        (
            "broker.conf",
            "other.conf",
            {
                "=named.properties": "=other.properties",
                "=broker-a": "=broker-b",
                "=store": "=other",
                named.broker.rpartition(":")[2]: str(named.free_port),
                named.monitor.rpartition(":")[2]: "0",
            },
        ),
    ):
        text = (named.folder / file).read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        named.write(copy, text)
    daemon = named.daemon("broker", "other", named.free_port)
    daemon.start()
    daemon.wait_up()
    wait_until(lambda: '"event": "registered"' in daemon.said())
    yield daemon
    daemon.stop()


@pytest.mark.slow
def test_brokers_accept_a_certificate_with_the_other_brokers_name(
    named: Secured, other: Daemon
) -> None:
    """One passes pulls of an earlier part of a queue on to the other."""
    with blocking.Admin(**named.at) as admin, blocking.Producer(**named.at) as producer:
        admin.create_static_topic("Moved", 1, brokers=["broker-a"])
        producer.send(headrace.Message("Moved", b"at a"))
        admin.remap_static_topic("Moved", ["broker-b"])
        producer.send(headrace.Message("Moved", b"at b"))
    with blocking.Consumer("both", "Moved", start="earliest", **named.at) as consumer:
        read = islice(consumer.until(timeout_ms=30_000), 2)
        assert [message.body for message in read] == [b"at a", b"at b"]
    assert "TLS" not in other.said()


@pytest.mark.slow
def test_commands_connect_by_a_context(secured: Secured) -> None:
    def ask(*arguments: str) -> str:
        done = secured.command(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    refused = secured.command("cluster", "-n", secured.nameserver)
    assert "this port speaks TLS: connect with tls=True (HEADRACE_TLS=1)" in refused.stderr
    ask("context", "add", "lab", secured.nameserver, "--ca-file", secured.ca_file)
    ask("context", "use", "lab")
    ask("send", "Lab", "a secret")
    assert "a secret" in ask("consume", "Lab", "--from", "earliest", "--max", "1")
    assert [row["role"] for row in json.loads(ask("doctor", "--json"))] == ["nameserver", "broker"]


@pytest.mark.slow
@pytest.mark.parametrize(("days", "rows"), [(1, 0), (400, 2)])
def test_doctor_names_a_certificate_that_expires_soon(
    secured: Secured, days: int, rows: int
) -> None:
    """Later in time, as a clock of the machine that asks would have it."""
    settings = ClientTls(ca_file=secured.ca_file)

    def later_ms() -> int:
        return now_ms() + days * 86_400_000

    checks = trio.run(diagnose, [secured.nameserver], settings, later_ms)
    found = [check for check in checks if check.role == "certificate"]
    assert len(found) == rows
    assert all("it expires at 20" in (check.problem or "") for check in found)


def test_doctor_names_tls_of_a_plain_connection(secured: Secured) -> None:
    done = run("doctor", "--json", nameserver=secured.nameserver)
    (row,) = json.loads(done.stdout)
    assert row["problem"].startswith("this port speaks TLS: connect with TLS, by HEADRACE_TLS=1")


@pytest.mark.slow
async def test_clients_of_python_connect_by_arguments(secured: Secured) -> None:
    async with headrace.Producer(**secured.at) as producer:
        await producer.send(headrace.Message("Async", b"async"))
    async with headrace.PullConsumer(start="earliest", **secured.at) as consumer:
        await consumer.assign(await consumer.queues("Async"))
        batch = await consumer.receive_many()
        assert batch is not None
        assert [message.body for message in batch] == [b"async"]
    async with headrace.Admin(**secured.at) as admin:
        assert [broker.broker_name for broker in await admin.cluster()] == ["broker-a"]
        await admin.create_topic("Table")
    async with headrace.Table("Table", **secured.at) as table:
        await table.put("key", b"value")
        assert await table.get("key") == b"value"


@pytest.mark.slow
def test_blocking_clients_connect_by_arguments(secured: Secured) -> None:
    with blocking.Producer(**secured.at) as producer:
        producer.send(headrace.Message("Blocking", b"blocking"))
    with blocking.Consumer("blocking", ["Blocking"], start="earliest", **secured.at) as consumer:
        assert next(iter(consumer)).body == b"blocking"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nameserver", "broker"])
def test_settings_without_effect_are_named_by_a_check(secured: Secured, kind: str) -> None:
    text = (secured.folder / "tls.properties").read_text()
    secured.write("apache.properties", text, "tls.client.authServer=false")
    settings = (secured.folder / f"{kind}.conf").read_text()
    secured.write("apache.conf", settings.replace("tls.properties", "apache.properties"))
    done = secured.command(kind, "-c", "apache.conf", "--check-config")
    assert done.returncode == 0, done.stderr
    assert "apache.properties: tls.client.authServer: without effect" in done.stderr


async def test_unusable_files_are_named_before_any_connection(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.pem: No such file"):
        headrace.Producer(ca_file=tmp_path / "nowhere.pem")
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ConfigurationError, match=r"empty\.pem: no certificates of authorities"):
        headrace.Producer(ca_file=tmp_path / "empty.pem")


@pytest.mark.slow
async def test_a_server_of_another_authority_is_named(secured: Secured, tmp_path: Path) -> None:
    ca_file = Authority.new(tmp_path / "other").ca_file
    async with headrace.Producer(nameserver=secured.nameserver, ca_file=ca_file) as producer:
        with pytest.raises(NameserverUnavailable, match="authority that is not trusted here"):
            await producer.send(headrace.Message("Other", b"body"))


def test_the_broker_shows_when_its_certificate_expires(secured: Secured) -> None:
    page = urllib.request.urlopen(f"http://{secured.monitor}/metrics").read().decode()
    (line,) = [
        line for line in page.splitlines() if line.startswith("headrace_certificate_expiry_seconds")
    ]
    made = x509.load_pem_x509_certificate((secured.folder / "certificates/server.pem").read_bytes())
    assert float(line.split()[-1]) == made.not_valid_after_utc.timestamp()
