"""Users of a cluster of processes, over TLS: each kind of client, by each way to say who it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from headrace import Consumer, Message, Producer, blocking
from headrace.errors import AccessDenied, LogInFailed
from headrace.rights import Rule
from headrace_protocol.rights.credentials import Credentials
from tests.support.secured import Secured

pytestmark = pytest.mark.slow

ROOT: Any = {"user": "root", "password": "hidden-root"}
ALICE = Credentials("alice", "hidden-alice")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with Secured(tmp_path_factory.mktemp("users"), users=True) as secured:
        with blocking.Admin(**secured.at, **ROOT) as admin:
            admin.create_topic("Orders", queues=2)
            admin.create_topic("Salaries", queues=1)
            admin.create_user(*ALICE)
            rules = [Rule("Topic:Orders", ("Pub", "Sub")), Rule("Group:shop", ("Sub", "Create"))]
            admin.set_rules("alice", rules)
        yield secured
    said = "".join(daemon.said() for daemon in secured.daemons)
    assert "hidden" not in said


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_user_does_what_its_rules_allow(cluster: Secured, backend: str) -> None:
    async def main() -> None:
        at: Any = {**cluster.at, **ALICE._asdict()}
        async with Producer(**at) as producer:
            await producer.send(Message("Orders", b"one"))
            await producer.send_many([Message("Orders", b"many") for _ in range(100)])
            with pytest.raises(AccessDenied, match="no permission to access Topic:Salaries"):
                await producer.send(Message("Salaries", b"x"))
        with anyio.fail_after(60):
            async with Consumer("shop", "Orders", start="earliest", **at) as consumer:
                async for _ in consumer:
                    break

    anyio.run(main, backend=backend)


def test_a_wrong_password_is_told_at_once(cluster: Secured) -> None:
    with (
        pytest.raises(LogInFailed, match="as 'alice': log-in rejected") as caught,
        blocking.Producer(**cluster.at, user="alice", password="hidden-wrong") as producer,
    ):
        producer.send(Message("Orders", b"x"))
    assert "hidden" not in str(caught.value)


def test_commands_log_in_by_a_context(cluster: Secured, tmp_path: Path) -> None:
    password = tmp_path / "alice.pw"
    password.write_text(ALICE.password)
    password.chmod(0o600)
    named = ("--ca-file", cluster.ca_file, "--user", "alice", "--password-file", str(password))
    assert not cluster.command("context", "add", "c", cluster.nameserver, *named).stderr
    assert not cluster.command("context", "use", "c").stderr
    assert cluster.command("send", "Orders", "an order").returncode == 0
    denied = cluster.command("send", "Salaries", "a guess")
    assert denied.returncode == 1
    assert "has no permission to access Topic:Salaries" in denied.stderr


def test_another_password_ends_open_connections(cluster: Secured) -> None:
    with blocking.Admin(**cluster.at, **ROOT) as admin:
        admin.create_user("bob", "hidden-bob")
        admin.set_rules("bob", [Rule("Topic:Orders", ("Pub",))])
        bob: Any = {"user": "bob", "password": "hidden-bob"}
        with blocking.Producer(**cluster.at, **bob) as producer:
            producer.send(Message("Orders", b"x"))
            admin.update_user("bob", password="hidden-another")
            with pytest.raises(AccessDenied):
                producer.send(Message("Orders", b"x"))
