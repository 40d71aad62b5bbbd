"""A broker of headrace and one of Apache RocketMQ in one cluster that serves users only.

Under the nameserver of either: both brokers register with the inner credentials, which headrace's
nameserver requires, and clients of both kinds use both brokers as one user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from headrace import Message, MessageQueue, Rule, blocking
from headrace.errors import AccessDenied
from tests.conformance.console import Console, console
from tests.conformance.peer import QUICK_JVM, quick_peer, second_apache, second_headrace
from tests.conformance.test_rights import tools_yml
from tests.conformance.test_users import ROOT, SETTINGS
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.long]

# Apache's brokers sign, and there is no TLS.
USERS = {**SETTINGS, "authRequiresTls": "none"}
# Of headrace's nameserver; Apache's checks nobody.
OF_NAMESERVER = {key: value for key, value in USERS.items() if not key.endswith("Provider")}
SIGNER = (ROOT["user"], ROOT["password"])
TOPIC, GROUP = "Mixed", "mixed-group"
ALICE: Any = {"user": "alice", "password": "alice's password"}
RULES = [
    # Apache asks for Get of those who look for the ends of a queue.
    Rule(f"Topic:{TOPIC}", ("Pub", "Sub", "Get")),
    Rule("Group:*", ("Sub", "Create", "Get")),
]


class Mixed(NamedTuple):
    """The running cluster. brokers: addresses by name."""

    nameserver: str
    brokers: dict[str, str]


@pytest.fixture(scope="module", params=["apache", "headrace"])
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mixed]:
    first: str = request.param
    home = tmp_path_factory.mktemp(first)
    with quick_peer(first, settings=USERS, nameserver_settings=OF_NAMESERVER) as peer:
        second = (
            second_headrace(peer, home, "broker-b", settings=USERS)
            if first == "apache"
            else second_apache(peer, home, "broker-b", settings=USERS, jvm=QUICK_JVM)
        )
        with second as address:
            found = Mixed(peer.nameserver, {"broker-a": peer.broker, "broker-b": address})
            with blocking.Admin(nameserver=peer.nameserver, **ROOT) as admin:
                wait_until(lambda: len(admin.cluster()) == 2, limit_s=60)
                admin.create_topic(TOPIC, queues=2)
                admin.create_user(ALICE["user"], ALICE["password"])
                admin.set_rules(ALICE["user"], RULES)
            yield found


def test_both_brokers_have_registered(mixed: Mixed) -> None:
    with blocking.Admin(nameserver=mixed.nameserver, **ROOT) as admin:
        assert {node.broker_name: node.address for node in admin.cluster()} == mixed.brokers


def test_our_clients_use_both_as_one_user(mixed: Mixed) -> None:
    with blocking.Producer(nameserver=mixed.nameserver, **ALICE) as producer:
        brokers = Counter(
            producer.send(Message(TOPIC, b"%d" % n)).queue.broker_name for n in range(20)
        )
    assert set(brokers) == {"broker-a", "broker-b"}
    bodies = []
    at: Any = {"nameserver": mixed.nameserver, **ALICE}
    with blocking.Consumer(GROUP, TOPIC, start="earliest", **at) as consumer:
        for message in consumer.until(60_000):
            bodies.append(int(message.body))
            if len(bodies) == 20:
                break
    assert sorted(bodies) == list(range(20))


@pytest.fixture(scope="module")
def java(mixed: Mixed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """The official client as alice, and mqadmin as root."""
    home = tmp_path_factory.mktemp("java")
    options = (
        f"-Dheadrace.accessKey={ALICE['user']}",
        f"-Dheadrace.secretKey={ALICE['password']}",
        *tools_yml(home, *SIGNER),
    )
    with console(home, options) as running:
        yield running


def test_java_clients_use_both_as_one_user(mixed: Mixed, java: Console) -> None:
    member = java.join(mixed.nameserver, f"{GROUP}-of-java", TOPIC, "averagely")
    with blocking.Producer(nameserver=mixed.nameserver, **ALICE) as producer:
        sent = [producer.send(Message(TOPIC, b"for Java %d" % n)) for n in range(8)]
    assert len({each.queue.broker_name for each in sent}) == 2
    expected = {f"for Java {n}" for n in range(8)}
    wait_until(lambda: expected <= set(java.received(member)), limit_s=60)
    java.leave(member)
    listed = java.run(mixed.nameserver, "clusterList")
    assert all(address in listed for address in mixed.brokers.values()), listed


def test_a_topic_without_rules_is_refused_by_both(mixed: Mixed) -> None:
    with blocking.Admin(nameserver=mixed.nameserver, **ROOT) as admin:
        admin.create_topic("Salaries", queues=1)
    refusal = "User:alice has no permission to access Topic:Salaries"
    for name in mixed.brokers:
        queue = MessageQueue("Salaries", name, 0)
        with (
            blocking.PullConsumer(nameserver=mixed.nameserver, **ALICE) as reader,
            pytest.raises(AccessDenied, match=refusal),
        ):
            reader.max_offset(queue)
