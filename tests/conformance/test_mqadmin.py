"""mqadmin's commands on our broker and nameserver: what each prints, in both codecs.

Those of ``allow.txt`` are scenarios of the Java suite; FINDINGS.md names what is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import headrace
from headrace import Message, blocking
from headrace.messages import SendResult
from headrace_protocol.bodies import SubscriptionGroupConfig
from headrace_protocol.system_topics import TRACE_TOPIC
from tests.conformance.console import Console, console
from tests.conformance.peer import missing_tools
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.slow]


@dataclass
class Cluster:
    """A running cluster with a topic T of four messages, which group g has consumed."""

    console: Console
    nameserver: str
    address: str
    client_id: str
    sent: list[SendResult]
    folder: Path

    def run(self, *words: str) -> str:
        return self.console.run(self.nameserver, *words)


@pytest.fixture(scope="module", params=["JSON", pytest.param("ROCKETMQ", marks=pytest.mark.long)])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if reason := missing_tools():
        pytest.fail(reason)
    folder = tmp_path_factory.mktemp("mqadmin")
    codec = f"-Drocketmq.serialize.type={request.param}"
    with headrace.embedded() as mq, console(folder, [codec]) as running:
        name = mq.nameserver
        with blocking.Admin(nameserver=name) as admin:
            admin.create_topic("T", queues=2)
            admin.create_topic(TRACE_TOPIC, queues=1)
            (node,) = admin.cluster()
            with (
                blocking.Producer(nameserver=name, group="p", trace=True) as producer,
                blocking.Consumer(
                    "g", "T", start="earliest", nameserver=name, trace=True
                ) as consumer,
            ):
                sent = [
                    producer.send(Message("T", b"%d" % number, key=f"k{number}"))
                    for number in range(4)
                ]
                for _ in zip(range(4), consumer, strict=False):
                    pass
                consumer.commit()
                wait_until(lambda: bool(admin.query_by_key(TRACE_TOPIC, sent[0].message_id)))
                (connection,) = admin.members("g").values()
                client_id = connection.connection_set[0].client_id
                yield Cluster(running, name, node.address, client_id, sent, folder)


def listed(cluster: Cluster, name: str, rows: object) -> str:
    path = cluster.folder / name
    path.write_text(json.dumps(rows))
    return str(path)


TOPIC = {
    "order": False,
    "perm": 6,
    "readQueueNums": 2,
    "topicFilterType": "SINGLE_TAG",
    "topicName": "L1",
    "topicSysFlag": 0,
    "writeQueueNums": 2,
}
Words = Callable[[Cluster], list[str]]
# The arguments of each command, and what it prints.
COMMANDS: dict[str, tuple[Words, list[str]]] = {
    "addWritePerm": (lambda _: ["-b", "broker-a"], ["add write perm of broker[broker-a]", "OK"]),
    "allocateMQ": (lambda _: ["-t", "T", "-i", "10.0.0.1,10.0.0.2"], ['"10.0.0.2":[{']),
    "brokerConsumeStats": (lambda c: ["-b", c.address], ["T  ", "g  ", "broker-a"]),
    "checkMsgSendRT": (lambda _: ["-t", "T", "-a", "2", "-s", "10"], ["Avg RT"]),
    "cleanExpiredCQ": (lambda c: ["-b", c.address], ["success"]),
    "cleanUnusedTopic": (lambda c: ["-b", c.address], ["success"]),
    "consumeMessage": (lambda _: ["-t", "T", "-g", "g2", "-c", "1"], ["Consume ok", "MSGID: "]),
    "consumerStatus": (lambda _: ["-g", "g"], ["V5_5_0", "Rebalance OK"]),
    "deleteExpiredCommitLog": (lambda c: ["-b", c.address], ["success"]),
    "deleteKvConfig": (lambda _: ["-s", "n", "-k", "a"], ["delete kv config", "success"]),
    "deleteSubGroup": (lambda c: ["-b", c.address, "-g", "gone"], ["[gone]", "success"]),
    "exportConfigs": (
        lambda c: ["-c", "DefaultCluster", "-f", str(c.folder)],
        ["configs.json success"],
    ),
    "exportMetadata": (
        lambda c: ["-c", "DefaultCluster", "-f", str(c.folder)],
        ["metadata.json success"],
    ),
    "exportMetrics": (
        lambda c: ["-c", "DefaultCluster", "-f", str(c.folder)],
        ["metrics.json success"],
    ),
    "getConsumerConfig": (lambda _: ["-g", "g"], ["groupName", "retryMaxTimes"]),
    "getNamesrvConfig": (lambda _: [], ["listenPort"]),
    "haStatus": (lambda c: ["-b", c.address], ["#SlaveNum\t0", "#MasterCommitLogMaxOffset"]),
    "printMsg": (lambda _: ["-t", "T", "-d", "true"], ["MSGID: ", "BODY: 0"]),
    "printMsgByQueue": (
        lambda c: [
            *("-t", "T", "-a", "broker-a", "-p", "true", "-d", "true"),
            *("-i", str(c.sent[0].queue.queue_id)),
        ],
        ["MSGID: ", "BODY: 0"],
    ),
    "producer": (lambda c: ["-b", c.address], ["producer group (p)", "language=PYTHON"]),
    "producerConnection": (lambda _: ["-g", "p", "-t", "T"], ["PYTHON", "V5_5_0"]),
    "queryCq": (
        lambda c: ["-t", "T", "-q", "0", "-i", "0", "-c", "1", "-b", c.address],
        ["physicOffset="],
    ),
    "queryMsgByOffset": (
        lambda c: [
            *("-t", "T", "-b", "broker-a", "-i", str(c.sent[0].queue.queue_id)),
            *("-o", str(c.sent[0].queue_offset)),
        ],
        ["[k0]"],
    ),
    "queryMsgByUniqueKey": (lambda c: ["-t", "T", "-i", c.sent[0].message_id], ["[k0]"]),
    "queryMsgTraceById": (
        lambda c: ["-i", c.sent[0].message_id, "-t", TRACE_TOPIC],
        ["Pub        p ", "success"],
    ),
    "sendMessage": (lambda _: ["-t", "T", "-p", "hello"], ["SEND_OK"]),
    "sendMsgStatus": (lambda _: ["-b", "broker-a", "-s", "10", "-c", "1"], ["SEND_OK"]),
    "setCommitLogReadAheadMode": (lambda c: ["-b", c.address, "-m", "1"], ["without effect"]),
    "setConsumeMode": (
        lambda c: ["-b", c.address, "-t", "T", "-g", "other", "-m", "PULL", "-q", "0"],
        ["success", "consume mode[PULL]"],
    ),
    "skipAccumulatedMessage": (lambda _: ["-g", "g", "-t", "T"], ["#offset", "broker-a"]),
    "statsAll": (lambda _: ["-t", "T"], ["#InTPS", "T  ", "g  "]),
    "topicClusterList": (lambda _: ["-t", "T"], ["DefaultCluster"]),
    "updateBrokerConfig": (
        lambda c: ["-b", c.address, "-k", "fileReservedTime", "-v", "71"],
        ["update broker config success"],
    ),
    "updateKvConfig": (lambda _: ["-s", "n", "-k", "a", "-v", "b"], ["success"]),
    "updateOrderConf": (
        lambda _: ["-m", "put", "-t", "T", "-v", "broker-a:2"],
        ["success", "orderConf=[broker-a:2]"],
    ),
    "updateSubGroupList": (
        lambda c: ["-b", c.address, "-f", listed(c, "groups", [{"groupName": "listed"}])],
        ["success"],
    ),
    "updateTopicList": (
        lambda c: ["-b", c.address, "-f", listed(c, "topics", [TOPIC])],
        ["success"],
    ),
    "wipeWritePerm": (lambda _: ["-b", "nobody"], ["wipe write perm of broker[nobody]", "OK, 0"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_it_should(cluster: Cluster, command: str) -> None:
    words, expected = COMMANDS[command]
    printed = cluster.run(command, *words(cluster))
    assert "Exception" not in printed, printed
    assert [text for text in expected if text not in printed] == [], printed


def test_settings_of_a_nameserver_are_not_changed(cluster: Cluster) -> None:
    printed = cluster.run("updateNamesrvConfig", "-k", "a", "-v", "b")
    assert "CODE: 16" in printed
    assert "restart it" in printed


def test_a_clone_needs_a_group(cluster: Cluster) -> None:
    with blocking.Admin(nameserver=cluster.nameserver) as admin:
        admin.create_group(SubscriptionGroupConfig(group_name="cloned"))
    printed = cluster.run("cloneGroupOffset", "-s", "g", "-d", "cloned", "-t", "T")
    assert "clone group offset success" in printed
