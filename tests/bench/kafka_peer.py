"""Apache Kafka 4, beside which the Python clients are measured.

``running_kafka()`` starts one process that is broker and controller (KRaft's combined mode) on
free loopback ports over a throw-away log, and stops it again.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.peer import HOST, Daemon, PeerError, free_ports, java_build

PROJECT = Path(__file__).resolve().with_name("kafka")
PARTITIONS = 8

# The distribution's own config/server.properties, but for the ports, the folder and the number of
# partitions. It never waits for the disk: like RocketMQ's asynchronous flush.
SETTINGS = f"""\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers={HOST}:{{controller_port}}
listeners=PLAINTEXT://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}
advertised.listeners=PLAINTEXT://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs={{store}}
num.partitions={PARTITIONS}
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""

# kafka-run-class.sh and kafka-server-start.sh of the distribution.
COLLECTOR = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-XX:MaxInlineLevel=15",
    "-Djava.awt.headless=true",
)
# The word that it is ready is an information.
BROKER_OPTIONS = ("-Xms1g", "-Xmx1g", "-Dheadrace.log.level=INFO")
# kafka-storage.sh.
TOOL_OPTIONS = ("-Xmx512m",)


@dataclass
class KafkaPeer:
    """A running Kafka.

    address: what clients call the bootstrap server.
    """

    address: str
    broker: Daemon


@contextlib.contextmanager
def running_kafka(directory: Path | None = None) -> Iterator[KafkaPeer]:
    """A fresh Kafka, ready for clients; stopped on leaving the block.

    directory: where the throw-away folder is made; None for the system's temporary one.
    """
    home = Path(tempfile.mkdtemp(prefix="headrace-kafka-", dir=directory))
    try:
        with _started(home) as peer:
            yield peer
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def _started(home: Path) -> Iterator[KafkaPeer]:
    port = free_ports(2)
    settings = home / "server.properties"
    settings.write_text(SETTINGS.format(port=port, controller_port=port + 1, store=home / "store"))
    _format_storage(settings)
    daemon = Daemon.start(
        java_command("kafka.Kafka", str(settings), options=BROKER_OPTIONS), home / "kafka.log"
    )
    try:
        daemon.wait_for(r"Kafka Server started")
        yield KafkaPeer(f"{HOST}:{port}", daemon)
    finally:
        # In order it would first bring to disk what is thrown away.
        daemon.kill()


def _format_storage(settings: Path) -> None:
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # In one word: an id may begin with a hyphen.
    arguments = ("format", "--standalone", f"--cluster-id={cluster_id}", "-c", str(settings))
    _check(java_command("kafka.tools.StorageTool", *arguments), settings.parent)


def java_command(main: str, *arguments: str, options: Sequence[str] = TOOL_OPTIONS) -> list[str]:
    """Command line of one of Kafka's programs, or of ours; built first when need be (54 MB)."""
    build = java_build(PROJECT)
    return [
        "java",
        *options,
        *COLLECTOR,
        f"-Dlog4j2.configurationFile={PROJECT / 'log4j2.properties'}",
        *("-cp", f"{build / 'classes'}{os.pathsep}{build / 'lib'}/*"),
        main,
        *arguments,
    ]


def _check(command: Sequence[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerError(f"`{' '.join(command)}` in {directory} failed:\n{done.stdout}{done.stderr}")
