"""``headrace quota`` against a real broker."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

import headrace as library
from headrace import Message, blocking
from headrace.embedded import Embedded
from headrace.errors import ConfigurationError
from headrace_protocol.quotas import Quota
from tests.support.cli import fail, succeed

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def mq() -> Iterator[Embedded]:
    with library.embedded() as mq:
        yield mq


def test_quotas_are_set_listed_and_removed(mq: Embedded) -> None:
    assert succeed("quota", "list").stderr == "no quotas are set\n"
    shown = succeed("quota", "set", "topic", "orders", "--bytes-in", "10MB").stdout
    assert "10.0 MB/s" in shown
    succeed("quota", "set", "user", "*", "--requests", "1000", "--connections", "100")
    topic, user, at_nameserver = succeed("quota", "list", "--json").json()
    assert at_nameserver == user | {"daemon": f"nameserver {mq.nameserver}"}
    assert (topic["of"], topic["name"], topic["bytes_in"]) == ("topic", "orders", 10_000_000)
    assert (user["requests"], user["connections"], user["cpu"]) == (1000, 100, None)
    # A quota is set as a whole.
    succeed("quota", "set", "user", "*", "--cpu", "0.5")
    users = [row for row in succeed("quota", "list", "--json").json() if row["of"] == "user"]
    assert [(row["requests"], row["cpu"]) for row in users] == [(None, 0.5)] * 2
    # Nameservers get what they can apply, and a broker alone what is meant for it.
    shown = succeed("quota", "set", "user", "*", "--staged-bytes", "1.5GB", "--topics", "9").stdout
    assert "1500.0 MB staged" in shown
    (user,) = (row for row in succeed("quota", "list", "--json").json() if row["of"] == "user")
    assert (user["staged_bytes"], user["topics"]) == (1_500_000_000, 9)
    succeed("quota", "set", "user", "ann", "--cpu", "0.5", "--broker", user["daemon"])
    assert [row["name"] for row in succeed("quota", "list", "--json").json()][1:] == ["*", "ann"]
    for of, name in (("group", "ann"), ("user", "nobody")):
        said = fail(3, "quota", "remove", of, name)
        assert said == f"headrace: {of} {name} has no quota; see `headrace quota list`\n"
    fail(2, "quota", "remove", "user", "ann", "--broker", "nowhere")
    removed = succeed("quota", "remove", "user", "ann", "--broker", user["daemon"])
    assert "user ann" in removed.stdout
    fail(3, "quota", "remove", "user", "ann", "--broker", user["daemon"])
    for of, name in (("topic", "orders"), ("user", "*")):
        assert succeed("quota", "remove", of, name).stdout
    assert succeed("quota", "list", "--json").json() == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("set", "topic", "T"), "give at least one limit"),
        (("set", "topic", "T", "--bytes-in", "ten"), "'ten' is no number of bytes"),
        (("set", "topic", "T", "--bytes-in", "10 parsecs"), "no number of bytes"),
        (("set", "topic", "T", "--topics", "5"), "topics is no limit of a topic"),
        (
            ("set", "group", "g", "--bytes-in", "5MB"),
            "bytes_in is no limit of a group, which has requests, bytes_out, cpu",
        ),
        (("set", "user", "a", "--cpu", "2"), "above 1"),
        (("set", "table", "T", "--cpu", "2"), "'table' is not one of"),
    ],
)
def test_limits_that_make_no_sense(mq: Embedded, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in fail(2, "quota", *arguments)


def test_a_producer_keeps_to_the_rate_of_its_topic(mq: Embedded) -> None:
    with blocking.Admin(nameserver=mq.nameserver) as admin:
        with pytest.raises(ConfigurationError, match="at least 0"):
            admin.set_quota(Quota(of="topic", name="slow", bytes_in=-1.0))
        with blocking.Producer(nameserver=mq.nameserver) as producer:
            producer.send(Message("slow", b"x"))
            admin.set_quota(Quota(of="topic", name="slow", bytes_in=20_000.0))
            began = time.monotonic()
            for _ in range(4):
                producer.send(Message("slow", random.randbytes(10_000)))  # not compressible
            # The first second's worth is there at once; the rest comes at the rate.
            assert time.monotonic() - began >= 0.5
        admin.set_quota(Quota(of="topic", name="slow"))
