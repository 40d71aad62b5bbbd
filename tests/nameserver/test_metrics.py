"""A nameserver's answers over HTTP."""

from __future__ import annotations

import urllib.request

import trio

from headrace_daemon.metrics.daemon_metrics import DAEMON_METRICS
from headrace_daemon.network import MemoryNetwork
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.metrics import NAMESERVER_METRICS
from headrace_nameserver.server import NameServer
from headrace_protocol.codes import RequestCode
from headrace_protocol.drivers.aio import AsyncConnection
from tests.support.metrics import parse, value
from tests.support.nameserver import register_body, register_header


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        body: bytes = response.read()
        return body


async def test_it_counts_its_brokers() -> None:
    network = MemoryNetwork()
    server = NameServer(NameServerConfig(listen_port=0, monitor_port=0), network)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        connection = AsyncConnection(await network.connect(server.address), server.address)
        nursery.start_soon(connection.run)
        body = register_body("T", "U").encode()
        response = await connection.request(
            RequestCode.REGISTER_BROKER, register_header(), body, timeout_ms=5000
        )
        response.expect()

        async def ask(path: str) -> bytes:
            return await trio.to_thread.run_sync(get, server.monitor_address, path)

        assert await ask("/ready") == b'{"state":"serving"}\n'
        page = parse(await ask("/metrics"))
        assert value(page, "headrace_registered_brokers", node_type="nameserver") == 1
        assert value(page, "headrace_registered_topics") == 2
        assert value(page, "headrace_lost_brokers_total") == 0
        assert value(page, "headrace_departed_brokers") == 0
        silence_s = value(
            page, "headrace_broker_silence_seconds", broker_cluster=register_header().cluster_name
        )
        assert silence_s is not None
        assert silence_s < 60
        names = {metric.name for metric in (*DAEMON_METRICS, *NAMESERVER_METRICS)}
        # None waits, and there are no TLS, no audit log and no quotas.
        absent = {
            "headrace_waiting_requests",
            "headrace_certificate_expiry_seconds",
            "headrace_audit_dropped_total",
            "headrace_audit_failing_seconds",
            "headrace_quota_held_total",
            "headrace_quota_refused_total",
        }
        assert names - absent <= page.keys()
        nursery.cancel_scope.cancel()
