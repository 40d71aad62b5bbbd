"""A tool killed between any two requests, and a broker with it: a repair makes the topic whole."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from headrace import Message
from headrace.admin.statictopic import UnchangedTopic
from headrace.blocking import Admin, Producer
from headrace.errors import RouteNotFound
from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
REQUESTS_MAX = 12
MESSAGES = 6
# The words of the command after the topic's name.
CHANGES = {
    "create": "--static --queues 3",
    "grow": "--static --queues 5",
    "remap": "--to b,c",
    "remap available": "--to b,c --mode available",
    "rebalance": "",
    "delete": "--yes",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("brokers"), *"abc") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    # The leader before the change, and one after it.
    "dead",
    ["", *(pytest.param(name, marks=pytest.mark.long) for name in "ab")],
)
@pytest.mark.parametrize("name", CHANGES)
def test_a_tool_and_a_broker_killed_between_any_two_requests(
    cluster: Cluster, name: str, dead: str
) -> None:
    nameserver = cluster.nameserver.address
    with Admin(nameserver=nameserver) as admin, Producer(nameserver=nameserver) as producer:
        for sent in range(1, REQUESTS_MAX):
            topic = f"{name.replace(' ', '-')}-{dead}-{sent}"
            if name != "create":
                admin.create_static_topic(topic, 3, brokers=["a"])
                send(producer, topic)
            is_done = change(nameserver, sent, name, topic)
            if dead:
                kill(cluster, dead)
            if name == "delete":
                with suppress(RouteNotFound):  # it is gone
                    admin.delete_topic(topic)
                assert topic not in admin.topics()
            else:
                repair(admin, topic)
                count = sum(each.messages for each in admin.logic_queues(topic))
                assert count == (0 if name == "create" else MESSAGES)
                send(producer, topic)
            if is_done:
                return
    raise AssertionError(f"{name} has more requests than {REQUESTS_MAX}")


def change(nameserver: str, sent: int, name: str, topic: str) -> bool:
    """Run a tool that sends so many changes; whether it had no more to send."""
    verb = {"grow": "create", "remap available": "remap"}.get(name, name)
    words = ["topic", verb, topic, *CHANGES[name].split()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.dying_tool", str(sent), *words],
        cwd=ROOT,
        env={**os.environ, "HEADRACE_NAMESERVER": nameserver},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    return done.returncode == 0


def kill(cluster: Cluster, name: str) -> None:
    broker = cluster.brokers[name]
    broker.kill()
    broker.start()
    broker.wait_up()
    cluster.wait_registered()


def repair(admin: Admin, topic: str) -> None:
    """Repair a topic, which is whole then."""
    with suppress(UnchangedTopic):
        admin.repair_static_topic(topic)
    with pytest.raises(UnchangedTopic):
        admin.repair_static_topic(topic)


def send(producer: Producer, topic: str) -> None:
    for number in range(MESSAGES):
        producer.send(Message(topic, b"x", key=f"k{number}"))
