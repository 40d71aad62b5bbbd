"""No request makes a daemon connect to an address of the peer's choosing (CVE-2026-27446).

Every field of every request that is text holds an address, and so does every body.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from headrace import Admin, Message, Producer
from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.server import NameServer
from headrace_protocol.bodies import ConsumerData, HeartbeatData, SubscriptionData
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.header_codecs import SerializeType, encode_frame
from headrace_protocol.headers import CompactTopicHeader
from headrace_protocol.rights.wanted import TABLE
from tests.abuse.hostile import plain_fields
from tests.support.broker import BrokerUnderTest
from tests.support.rights import client_of, rights_of, users_of
from tests.support.wire import ask

ADDRESS = "10.9.8.7:6543"
ONEWAY = 2


class Watched(MemoryNetwork):
    """Notes the addresses to which anybody connects."""

    def __init__(self) -> None:
        super().__init__()
        self.connected: set[str] = set()

    async def connect(self, address: str) -> Any:
        self.connected.add(address)
        return await super().connect(address)


def fields_with(address: str, code: int) -> Iterator[dict[str, Any]]:
    """The header with the address in each of its texts, and in all of them."""
    plain = plain_fields(code)
    texts = [name for name, value in plain.items() if isinstance(value, str)]
    yield plain
    for name in texts:
        yield {**plain, name: address}
    yield {**plain, **dict.fromkeys(texts, address)}


def bodies_with(address: str) -> Iterator[bytes]:
    yield b""
    yield f"namesrvAddr={address}\nbrokerIP1={address}\n".encode()
    yield HeartbeatData(
        client_id=address,
        consumer_data_set=[
            ConsumerData(
                group_name="g", subscription_data_set=[SubscriptionData(topic="T", sub_string="*")]
            )
        ],
    ).encode()
    addresses = {"0": address}
    yield json.dumps(
        {
            "brokerAddr": address,
            "haServerAddr": address,
            "filterServerList": [address],
            "brokerAddrTable": {"broker-b": {"brokerName": "broker-b", "brokerAddrs": addresses}},
            "brokerDatas": [{"brokerName": "broker-b", "brokerAddrs": addresses, "cluster": "c"}],
            "queueDatas": [{"brokerName": "broker-b", "readQueueNums": 1, "writeQueueNums": 1}],
            "topicConfigSerializeWrapper": {"topicConfigTable": {}},
            "topic": address,
            "bname": "broker-b",
            "totalQueues": 1,
            "hostedQueues": {"0": [{"gen": 0, "queueId": 0, "bname": address}]},
        }
    ).encode()


@pytest.mark.slow
async def test_no_field_of_a_request_is_connected_to(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    network = Watched()
    async with trio.open_nursery() as nursery:
        nameserver = await nursery.start(NameServer(NameServerConfig(), network).run)
        config = BrokerConfig(store_path_root_dir=tmp_path / "store", namesrv_addr=nameserver)
        broker = await nursery.start(Broker(config, network).run)
        for daemon in (broker, nameserver):
            for code in sorted(TABLE):
                await send_all(network, daemon, code)
        # Whatever was put off, such as registrations and rebuilds, has its time.
        await trio.sleep(60)
        assert network.connected == {broker, nameserver}
        nursery.cancel_scope.cancel()


async def send_all(network: MemoryNetwork, daemon: str, code: int) -> None:
    """Requests of a code with the address everywhere; the daemon may close the connection."""
    stream = await network.connect(daemon)
    frames = [
        encode_frame(SerializeType.JSON, code, 1, flag=ONEWAY, fields=fields, body_bytes=len(body))
        + body
        for fields in fields_with(ADDRESS, code)
        for body in bodies_with(ADDRESS)
    ]
    try:
        await stream.send(b"".join(frames))
        await trio.sleep(0.01)
    except anyio.BrokenResourceError:
        pass
    finally:
        await stream.aclose()


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_rebuild_connects_to_no_stranger(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, is_listed: bool
) -> None:
    network = Watched()
    async with trio.open_nursery() as nursery:
        nameserver = await nursery.start(NameServer(NameServerConfig(), network).run)
        config = BrokerConfig(
            store_path_root_dir=tmp_path / "store",
            namesrv_addr=nameserver,
            rebuild_sources=ADDRESS if is_listed else "",
        )
        await nursery.start(Broker(config, network).run)
        async with Admin(nameserver=nameserver, connect=network.connect) as admin:
            attributes = {"cleanup.policy": "COMPACTION"}
            await admin.create_topic("C", queues=1, attributes=attributes)
            async with Producer(nameserver=nameserver, connect=network.connect) as producer:
                await producer.send(Message("C", b"v", key="k"))
            await trio.sleep(60)  # until its compaction log has the queue
            await admin.rebuild_topic("C", ADDRESS)
            await trio.sleep(60)
            (state,) = (await admin.rebuild_topic("C", ADDRESS, start=False)).values()
        assert ADDRESS not in network.connected  # nothing is missing
        assert ("no nameserver knows a broker" in state.rebuild_problem) is not is_listed
        nursery.cancel_scope.cancel()


def test_only_administrators_of_the_cluster_name_a_broker_to_rebuild_from(tmp_path: Path) -> None:
    """The one request whose address is meant to be connected to."""
    rights = rights_of(users_of(alice=["Topic:* All", "Group:* All", "Cluster:* Get"]))
    broker = BrokerUnderTest(tmp_path, rights=rights)
    broker.create_topic("C", 1, attributes={"cleanup.policy": "COMPACTION"})
    header = CompactTopicHeader(topic="C", rebuild_from=ADDRESS)
    for user, code in (("alice", ResponseCode.NO_PERMISSION), ("root", ResponseCode.SUCCESS)):
        answer = broker.ask(RequestCode.COMPACT_TOPIC, header, channel=client_of(user))
        assert answer.code == code, answer.remark
    state = CompactTopicHeader(topic="C", start=True)
    answer = broker.ask(RequestCode.COMPACT_TOPIC, state, channel=client_of("alice"))
    assert answer.code == ResponseCode.SUCCESS


# -- settings as commands: CVE-2023-33246 at the broker, CVE-2023-37582 at the nameserver ----------

COMMANDS = [
    "filterServerNums=1\nrocketmqHome=-c $@|sh . echo touch {mark};\n",
    "configStorePath={mark}\nproductEnvName=test/path\\ntest\\ntest\n",
    "configStorePathName=configStorePath\nconfigStorePath={mark}\n",
    "kvConfigPath={mark}\nuser=attacker\n",
    "brokerConfigPath={mark}\n",
    "storePathRootDir={mark}\n",
    "namesrvAddr={mark};touch {mark}\n",
]


def files(folder: Path) -> list[Path]:
    """What is there besides the broker's store, into which it saves its own tables."""
    return sorted(folder.iterdir())


@pytest.mark.parametrize("text", COMMANDS)
@pytest.mark.parametrize(
    "code", [RequestCode.UPDATE_BROKER_CONFIG, RequestCode.UPDATE_NAMESRV_CONFIG]
)
async def test_no_setting_is_a_command_or_names_a_file_to_write(
    tmp_path: Path, text: str, code: RequestCode
) -> None:
    mark, network = tmp_path / "mark", Watched()
    body = text.replace("{mark}", str(mark)).encode()
    async with trio.open_nursery() as nursery:
        broker = Broker(BrokerConfig(store_path_root_dir=tmp_path / "store"), network)
        nameserver = NameServer(NameServerConfig(), network)
        for daemon in (broker, nameserver):
            address = await nursery.start(daemon.run)
            before = files(tmp_path)
            answer = await ask(network, address, code, None, body)
            assert answer.command.code != ResponseCode.SUCCESS
            assert files(tmp_path) == before
        nursery.cancel_scope.cancel()
    assert not mark.exists()
