"""Apache RocketMQ's own integration tests, run as a black box against three brokers of ours.

The tests come compiled from Maven Central. Their base classes, which start brokers inside the
JVM, are replaced by those in ``apache_tests/``, which use the brokers that run here. All run in
one JVM, several classes side by side, since most of a test is waiting.

``apache_tests.txt`` lists what passes. A listed test that fails is a regression; one that passes
unlisted belongs on the list. ``FINDINGS.md`` says why the rest does not pass.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

import pytest

from tests.conformance.peer import QUICK_JVM, Peer, headrace_cluster, java_build

PROJECT = Path(__file__).with_name("apache_tests")
# Longest first, so that none is left alone at the end.
CLASSES = (
    "recall.SendAndRecallDelayMessageIT",
    "retry.PopConsumerRetryIT",
    "delay.NormalMsgDelayIT",
    "client.producer.transaction.TransactionalMsgIT",
    "client.producer.order.OrderMsgDynamicRebalanceIT",
    "client.producer.order.OrderMsgRebalanceIT",
    "client.producer.order.OrderMsgIT",
    "client.producer.order.OrderMsgWithTagIT",
    "client.consumer.balance.NormalMsgDynamicBalanceIT",
    "client.consumer.balance.NormalMsgStaticBalanceIT",
    "client.consumer.broadcast.normal.BroadcastNormalMsgNotReceiveIT",
    "client.consumer.broadcast.normal.BroadcastNormalMsgRecvCrashIT",
    "client.consumer.broadcast.normal.BroadcastNormalMsgRecvFailIT",
    "client.consumer.broadcast.normal.BroadcastNormalMsgRecvStartLaterIT",
    "client.consumer.broadcast.normal.BroadcastNormalMsgTwoDiffGroupRecvIT",
    "client.consumer.broadcast.normal.NormalMsgTwoSameGroupConsumerIT",
    "client.consumer.broadcast.tag.BroadcastTwoConsumerFilterIT",
    "client.consumer.broadcast.tag.BroadcastTwoConsumerSubDiffTagIT",
    "client.consumer.broadcast.tag.BroadcastTwoConsumerSubTagIT",
    "client.consumer.cluster.DynamicAddAndCrashIT",
    "client.consumer.cluster.DynamicAddConsumerIT",
    "client.consumer.cluster.DynamicCrashConsumerIT",
    "client.consumer.filter.SqlFilterIT",
    "client.consumer.pop.BatchAckIT",
    "client.consumer.pop.NotificationIT",
    "client.consumer.pop.PopBigMessageIT",
    "client.consumer.pop.PopMessageAndForwardingIT",
    "client.consumer.pop.PopOrderlyIT",
    "client.consumer.tag.MulTagSubIT",
    "client.consumer.tag.TagMessageWith1ConsumerIT",
    "client.consumer.tag.TagMessageWithMulConsumerIT",
    "client.consumer.tag.TagMessageWithSameGroupConsumerIT",
    "client.consumer.topic.MulConsumerMulTopicIT",
    "client.consumer.topic.OneConsumerMulTopicIT",
    "client.producer.async.AsyncSendExceptionIT",
    "client.producer.async.AsyncSendWithMessageQueueIT",
    "client.producer.async.AsyncSendWithMessageQueueSelectorIT",
    "client.producer.async.AsyncSendWithOnlySendCallBackIT",
    "client.producer.exception.msg.ChinaPropIT",
    "client.producer.exception.msg.MessageExceptionIT",
    "client.producer.exception.msg.MessageUserPropIT",
    "client.producer.exception.producer.ProducerGroupAndInstanceNameValidityIT",
    "client.producer.oneway.OneWaySendExceptionIT",
    "client.producer.oneway.OneWaySendIT",
    "client.producer.oneway.OneWaySendWithMQIT",
    "client.producer.oneway.OneWaySendWithSelectorIT",
    "client.producer.querymsg.QueryMsgByIdExceptionIT",
    "client.producer.querymsg.QueryMsgByIdIT",
    "client.producer.querymsg.QueryMsgByKeyIT",
)
CLASSES_AT_A_TIME = 6
# As BaseConf.java has them.
BROKERS = ("broker-a", "broker-b", "broker-c")
LIST = Path(__file__).with_name("apache_tests.txt")
# A quarter of an hour: a test that waits for a lost message takes two minutes to fail.
RUN_TIMEOUT_S = 900

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(
        os.environ.get("CONFORMANCE_PEER") == "apache", reason="Apache runs these on its own"
    ),
]


@dataclass(frozen=True)
class Outcome:
    ok: bool
    detail: str


def listed(section: str) -> list[str]:
    """Names of the tests in a section of apache_tests.txt, ``passes`` or ``either``."""
    lines = [line.partition("#")[0].split() for line in LIST.read_text().splitlines()]
    return [words[1] for words in lines if words and words[0] == section]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every test's outcome by its name, run by one JVM."""
    home = tmp_path_factory.mktemp("apache_tests")
    with headrace_cluster(home, BROKERS, {}) as peer, (home / "jvm.log").open("w") as errors:
        run = subprocess.Popen(command(peer, home), stdout=subprocess.PIPE, stderr=errors)
        watchdog = Timer(RUN_TIMEOUT_S, run.kill)
        watchdog.start()
        printed, _ = run.communicate()
        watchdog.cancel()
    results = [json.loads(line) for line in printed.splitlines()]
    return {result["test"]: Outcome(result["ok"], result["detail"]) for result in results}


def command(peer: Peer, home: Path) -> list[str]:
    tests, client = java_build(PROJECT), java_build()
    # Our classes come before those of the same names in the jars.
    class_path = [tests / "classes", client / "classes", tests / "lib" / "*", client / "lib" / "*"]
    return [
        "java",
        *QUICK_JVM,
        "-Xmx512m",
        f"-Duser.home={home}",
        # A consumer that misses its first rebalance tries again only after this; default 20 s.
        "-Drocketmq.client.rebalance.waitInterval=5000",
        f"-Dheadrace.nameserver={peer.nameserver}",
        f"-Dheadrace.broker={peer.broker}",
        *("-cp", os.pathsep.join(map(str, class_path))),
        "headrace.apachetests.Runner",
        str(CLASSES_AT_A_TIME),
        *CLASSES,
    ]


@pytest.mark.parametrize("name", listed("passes"))
def test_passes(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes.get(name, Outcome(ok=False, detail="no result"))
    assert outcome.ok, f"passes in {LIST.name}, but failed: {outcome.detail}"


@pytest.mark.parametrize("name", listed("either"))
def test_has_run(name: str, outcomes: dict[str, Outcome]) -> None:
    """FINDINGS.md says what its outcome depends on."""
    assert name in outcomes


def test_every_test_is_listed(outcomes: dict[str, Outcome]) -> None:
    known = {*listed("passes"), *listed("either")}
    unlisted = {name: outcome for name, outcome in outcomes.items() if name not in known}
    assert not unlisted, f"add them to {LIST.name}"
