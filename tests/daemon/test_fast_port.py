"""The second port of a broker, two below the first, where old clients and dashboards ask."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from headrace_broker.config import BrokerConfig
from headrace_broker.server import Broker
from headrace_daemon.network import Listener, MemoryNetwork, TcpNetwork, listen_with_fast
from headrace_protocol.codes import RequestCode, ResponseCode
from tests.support.wire import ask, send_header

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    ("network", "port"), [(TcpNetwork(), 0), (MemoryNetwork(), 10911)], ids=["tcp", "memory"]
)
@pytest.mark.parametrize("fast_listen_port", [-1, 0])
async def test_both_ports_serve_the_same_broker(
    network: TcpNetwork | MemoryNetwork, port: int, fast_listen_port: int, tmp_path: Path
) -> None:
    config = BrokerConfig(
        broker_name="b",
        bind_address=HOST,
        listen_port=port,
        fast_listen_port=fast_listen_port,
        store_path_root_dir=tmp_path,
        mapped_file_size_commit_log=1 << 20,
    )
    async with trio.open_nursery() as nursery:
        address = await nursery.start(Broker(config, network).run)
        fast = f"{HOST}:{int(address.rpartition(':')[2]) - 2}"
        if not fast_listen_port:
            with pytest.raises(OSError, match=r"refused|no server|failed"):
                await network.connect(fast)
        else:
            sent = await ask(network, fast, RequestCode.SEND_MESSAGE_V2, send_header(), b"body")
            assert sent.command.code == ResponseCode.SUCCESS, sent.command.remark
        nursery.cancel_scope.cancel()


def test_a_named_port_whose_fast_port_is_taken_is_rejected_with_the_setting() -> None:
    network = TcpNetwork()
    pair = listen_with_fast(network, HOST, 0, -1)
    pair.sockets[0].close()
    try:
        with pytest.raises(OSError, match=f"{HOST}:{pair.fast_port}.*fastListenPort") as raised:
            listen_with_fast(network, HOST, pair.port, -1)
        assert raised.value.errno == errno.EADDRINUSE
        listen_with_fast(network, HOST, pair.port, 0).close()
    finally:
        pair.close()


class Crowded(TcpNetwork):
    """A machine on which the port below the first free one is taken."""

    def __init__(self) -> None:
        self.rejected_count = 0

    def listen(self, host: str, port: int) -> Listener:
        if port and not self.rejected_count:
            self.rejected_count += 1
            raise OSError(errno.EADDRINUSE, "taken")
        return super().listen(host, port)


def test_a_free_port_is_chosen_again_while_its_fast_port_is_taken() -> None:
    network = Crowded()
    listener = listen_with_fast(network, HOST, 0, -1)
    listener.close()
    assert network.rejected_count == 1
    assert listener.fast_port == listener.port - 2
    assert len(listener.sockets) == 2
