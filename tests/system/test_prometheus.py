"""A real Prometheus scrapes a real broker and nameserver, with our rules and dashboard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from headrace import Consumer, Message, Producer
from tests.support import prometheus
from tests.support.prometheus import Prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "headrace.json"
RULE_TESTS = Path(__file__).with_name("alert_rules.yml")
TIMEOUT_S = 60
_METRIC = re.compile(r"\b(?:headrace|rocketmq|process)_\w+")
_LABEL = re.compile(r"\bby \([^)]*\)|\bon \([^)]*\)|\{[^}]*\}")


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    """A machine without Prometheus may pass by, but CI may not."""
    try:
        prometheus.tool("prometheus")
    except prometheus.PrometheusMissing as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


class Daemon:
    """A process with a monitor. address: where it serves; monitor: where it is scraped."""

    def __init__(self, module: str, config: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(config)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        found: dict[str, str] = {}
        for line in self.process.stderr:
            entry = json.loads(line)
            if "address" in entry:
                found[entry["event"]] = entry["address"]
            if entry["event"] == "serving":
                break
        self.address, self.monitor = found["serving"], found["monitor listening"]


@contextmanager
def daemons(folder: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """A nameserver and a broker."""
    started: list[Daemon] = []

    def start(module: str, **settings: object) -> Daemon:
        file = folder / f"{module}.conf"
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        started.append(Daemon(module, file))
        return started[-1]

    try:
        nameserver = start("headrace_nameserver.main", listenPort=0, monitorPort=0)
        broker = start(
            "headrace_broker.main",
            brokerName="b",
            listenPort=0,
            monitorPort=0,
            namesrvAddr=nameserver.address,
            storePathRootDir=folder / "store",
            mappedFileSizeCommitLog=1 << 24,
            messageStorePlugIn="tieredstore",
            tieredBackendServiceProvider="posix",
            tieredStoreFilePath=folder / "tier",
            auditLogPath=folder / "audit.log",
        )
        yield nameserver, broker
    finally:
        for daemon in reversed(started):
            daemon.process.terminate()
            daemon.process.communicate(timeout=TIMEOUT_S)


async def wait_for(server: Prometheus, expression: str, expected: float) -> None:
    """Until a query has at least a value, as the next scrape brings it.

    What a group had not committed when its queues moved is delivered again, and counted again.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while (value := await trio.to_thread.run_sync(server.value, expression) or 0) < expected:
        assert time.monotonic() < deadline, (expression, value)
        await trio.sleep(0.05)


def config(*targets: str) -> str:
    # JSON is YAML.
    return json.dumps(
        {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {"job_name": "headrace", "static_configs": [{"targets": list(targets)}]}
            ],
        }
    )


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def metrics_of(expression: str) -> set[str]:
    """Names of metrics, without those of labels."""
    return set(_METRIC.findall(_LABEL.sub("", expression)))


@pytest.mark.slow
async def test_prometheus_reads_a_cluster(tmp_path: Path) -> None:
    with (
        daemons(tmp_path) as (nameserver, broker),
        prometheus.running(tmp_path, config(nameserver.monitor, broker.monitor)) as server,
    ):
        await send(nameserver.address, 10)
        async with Consumer(
            "g", "orders", nameserver=nameserver.address, start="earliest"
        ) as first:
            for _ in range(10):
                await anext(aiter(first))
        await wait_for(server, 'sum(rocketmq_messages_out_total{consumer_group="g"})', 10)
        await send(nameserver.address, 5)
        async with Consumer("g", "orders", nameserver=nameserver.address):  # takes, commits nothing
            await wait_for(server, 'rocketmq_consumer_connections{consumer_group="g"}', 1)
            await wait_for(server, 'rocketmq_messages_in_total{topic="orders"}', 15)
            await wait_for(server, 'rocketmq_consumer_lag_messages{topic="orders"}', 5)
            await wait_for(server, "headrace_registered_brokers", 1)
            await trio.to_thread.run_sync(look_at, server)


async def send(nameserver: str, count: int) -> None:
    async with Producer(nameserver=nameserver) as producer:
        for number in range(count):
            await producer.send(Message("orders", f"{number}".encode()))


def look_at(server: Prometheus) -> None:
    """Both targets are up, and every expression of ours finds what it names."""
    targets = server.get("targets")["activeTargets"]
    assert [(each["health"], each["lastError"]) for each in targets] == [("up", "")] * 2
    (group,) = server.get("rules")["groups"]
    rules = {rule["name"]: rule for rule in group["rules"]}
    assert {rule.get("lastError", "") for rule in rules.values()} <= {""}
    expressions = [rule["query"] for rule in rules.values()]
    for expression in dashboard_expressions():
        text = expression.replace("$__rate_interval", "1m").replace("$node", ".+")
        assert server.query(text), f"the dashboard's {expression} finds nothing"
        expressions.append(text)
    names = set().union(*map(metrics_of, expressions))
    assert len(names) > 30
    unknown = sorted(name for name in names if not server.query(name))
    assert not unknown


def promtool(*arguments: object, stdin: bytes | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [prometheus.tool("promtool"), *map(str, arguments)],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout.decode()


def test_the_rules_are_sound() -> None:
    code, output = promtool("check", "rules", ALERTS)
    assert code == 0, output


def test_each_rule_fires_when_it_should(tmp_path: Path) -> None:
    names = re.findall(r"alert: (\w+)", ALERTS.read_text())
    text = RULE_TESTS.read_text()
    assert sorted(re.findall(r'alertname="(\w+)"', text)) == sorted(names)
    file = tmp_path / "tests.yml"
    file.write_text(text.replace("ALERTS_FILE", str(ALERTS)))
    code, output = promtool("test", "rules", file)
    assert code == 0, output


@pytest.mark.slow
def test_a_page_passes_promtool(tmp_path: Path) -> None:
    """It complains of RocketMQ's names, which are not ours to choose."""
    pages: list[bytes] = []
    with daemons(tmp_path) as started:
        for daemon in started:
            url = f"http://{daemon.monitor}/metrics"
            with urllib.request.urlopen(url, timeout=10) as response:
                pages.append(response.read())
    for page in pages:
        _, output = promtool("check", "metrics", stdin=page)
        assert [line for line in output.splitlines() if not line.startswith("rocketmq_")] == []
