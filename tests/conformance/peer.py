"""The two brokers that one suite runs against, and the Java that drives them.

``running("apache")`` and ``running("headrace")`` start a nameserver and a broker on free
loopback ports over a throw-away store, and stop them again. Both give the same ``Peer``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tests.conformance.probe import Signer, register, wait_for_route
from tests.support import building

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).resolve().with_name("java")
BUILDS = ROOT / ".cache"
HOST = "127.0.0.1"
START_TIMEOUT_S = 60
INIT_USER = "initAuthenticationUser"
# Of sends that shall happen once: after the client's own 3 s it tries again, and a machine's host
# may keep it from running for longer.
TIMEOUT_MS = 60_000
# Below Linux's ephemeral range, so that no outgoing connection takes a port we just found free.
PORTS = range(20_000, 32_000)

# The distribution's own start scripts, less their heaps of 8 and 4 GiB touched in advance.
NAMESERVER_HEAP = ("-Xms256m", "-Xmx256m")
BROKER_HEAP = ("-Xms2g", "-Xmx2g")
SHIPPED_JVM = (
    "-XX:+UseG1GC",
    "-XX:G1HeapRegionSize=16m",
    "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30",
    "-XX:SoftRefLRUPolicyMSPerMB=0",
    "-XX:-OmitStackTraceInFastThrow",
    "-XX:-UseLargePages",
)
QUICK_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class PeerError(Exception):
    """A tool is missing, or a daemon did not start."""


def missing_tools() -> str:
    """The Java side's needs that this machine lacks, as a sentence; empty when none."""
    missing = [tool for tool in ("java", "javac", "mvn") if shutil.which(tool) is None]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} not found on PATH: the official Java client needs a JDK 17 or "
        "newer and Maven (Debian: apt-get install openjdk-17-jdk-headless maven)"
    )


def java_build(project: Path = PROJECT, version: str = "") -> Path:
    """Folder with the jars (``lib/``) and programs (``classes/``) of a Maven project.

    version: of Apache RocketMQ, for a project whose folder of results has it in its name.
    Built when stale. The first build takes Apache RocketMQ from Maven Central into Maven's own
    repository (some 130 MB, half a minute); later ones need no network.
    """
    if problem := missing_tools():
        raise PeerError(problem)
    build = BUILDS / (f"{project.name}-{version}" if version else project.name)
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built, sources = build / "built", _sources_digest(project)
        if not built.exists() or built.read_text() != sources:
            chosen = [f"-Drocketmq.version={version}"] if version else []
            building.build(["mvn", "--batch-mode", "--quiet", "compile", *chosen], project)
            built.write_text(sources)
    return build


def _sources_digest(project: Path) -> str:
    """Digest of all sources: a checkout gives old files new times, and new files old ones."""
    digest = hashlib.sha256()
    for source in [project / "pom.xml", *sorted(project.glob("src/**/*.java"))]:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def driver_command(
    main: str, *, home: Path, codec: str = "JSON", options: Sequence[str] = ()
) -> list[str]:
    """Start of the command line of one of our Java programs.

    main: class below ``headrace``.
    home: where the official client keeps the offsets of broadcasting consumers, and mqadmin its
        files.
    codec: the client's header codec, ``"JSON"`` or ``"ROCKETMQ"``.
    options: more of the JVM's.
    """
    build = java_build()
    return [
        "java",
        f"-Duser.home={home}",
        # mqadmin leaves files there.
        f"-Djava.io.tmpdir={home}",
        f"-Drocketmq.serialize.type={codec}",
        # A consumer that misses its first rebalance tries again only after this; default 20 s.
        "-Drocketmq.client.rebalance.waitInterval=5000",
        "-Xmx1g",
        *options,
        *("-cp", f"{build / 'classes'}{os.pathsep}{build / 'lib'}/*"),
        f"headrace.{main}",
    ]


@dataclass
class Daemon:
    """One process of a peer; its output is kept in a file."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, command: Sequence[str], log: Path) -> Daemon:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        return cls(process, log)

    def wait_for(self, pattern: str, limit_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """First match of ``pattern`` in the output.

        Raises PeerError when the process ends, or has not printed it by the limit; then it is
        killed, since whoever starts it may not have it yet.
        """
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if match := re.search(pattern, self.log.read_text(errors="replace")):
                return match
            if ended or time.monotonic() > deadline:
                self.kill()
                state = f"ended with {self.process.returncode}" if ended else "was killed"
                wanted = f"{pattern!r} within {limit_s} s"
                raise PeerError(f"{self.process.args!r} {state}: no {wanted}\n{self.tail()}")
            time.sleep(0.01)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """Ends it at once: Apache's broker takes 15 s to close a store that we throw away."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ends it in order."""
        self.process.terminate()
        self.process.wait(START_TIMEOUT_S)

    def again(self) -> Daemon:
        """The same once more, when it has ended."""
        return self.start(cast("list[str]", self.process.args), self.log)


@dataclass
class Peer:
    """A running nameserver and broker; ``daemons`` by role, one only when they share a process."""

    name: str
    nameserver: str
    broker: str
    daemons: dict[str, Daemon]
    started: float

    @property
    def broker_pid(self) -> int:
        return self.daemons["broker"].process.pid

    @property
    def pids(self) -> list[int]:
        return [daemon.process.pid for daemon in self.daemons.values()]


@contextlib.contextmanager
def running(
    name: str,
    directory: Path | None = None,
    *,
    store: Path | None = None,
    settings: Mapping[str, str] | None = None,
    nameserver_settings: Mapping[str, str] | None = None,
    jvm: Sequence[str] = SHIPPED_JVM,
) -> Iterator[Peer]:
    """A fresh ``"apache"`` or ``"headrace"``, ready for clients; killed on leaving the block.

    directory: where the throw-away folder is made; None for the system's temporary one.
    store: the store's folder, which stays; None for one that goes with the rest.
    settings: more lines of the broker's file; with them, headrace is two processes, too.
    nameserver_settings: lines of the file of headrace's nameserver, if it has ``settings``.
    jvm: how Apache's daemons collect garbage and compile.
    """
    home = Path(tempfile.mkdtemp(prefix=f"headrace-{name}-", dir=directory))
    daemons: dict[str, Daemon] = {}
    try:
        peer = (
            _start_apache(home, store or home / "store", daemons, settings, jvm)
            if name == "apache"
            else _start_headrace(
                home, store or home / "store", daemons, settings, nameserver_settings or {}
            )
        )
        wait_for_route(peer.nameserver, START_TIMEOUT_S, signer=_signer(nameserver_settings))
        yield peer
    finally:
        for daemon in reversed(daemons.values()):
            daemon.kill()
        shutil.rmtree(home, ignore_errors=True)


def quick_peer(
    name: str,
    directory: Path | None = None,
    *,
    store: Path | None = None,
    settings: Mapping[str, str] | None = None,
    nameserver_settings: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Peer]:
    """``running`` for tests: JVMs that start in half the CPU time and run slower later."""
    return running(
        name,
        directory,
        store=store,
        settings=settings,
        nameserver_settings=nameserver_settings,
        jvm=QUICK_JVM,
    )


def _start_apache(
    home: Path,
    store: Path,
    daemons: dict[str, Daemon],
    more: Mapping[str, str] | None,
    jvm: Sequence[str],
) -> Peer:
    # The broker opens three: its own, the "fast" one two below and the replication one above.
    first = free_ports(5)
    nameserver, broker_port = f"{HOST}:{first}", first + 3
    java_build()
    started = time.monotonic()
    daemons["nameserver"] = Daemon.start(
        _apache_command(
            "namesrv.NamesrvStartup", home, f"listenPort={first}\n", [*NAMESERVER_HEAP, *jvm]
        ),
        home / "nameserver.log",
    )
    daemons["nameserver"].wait_for("boot success")
    settings = BROKER_SETTINGS.format(nameserver=nameserver, port=broker_port, store=store)
    # What comes later in the file counts.
    settings += _lines(more or {})
    daemons["broker"] = _start_apache_broker(home, settings, jvm)
    address = f"{HOST}:{broker_port}"
    register(nameserver, address, START_TIMEOUT_S, _signer(more))
    return Peer("apache", nameserver, address, daemons, started)


def _start_apache_broker(home: Path, settings: str, jvm: Sequence[str]) -> Daemon:
    command = _apache_command("broker.BrokerStartup", home, settings, [*BROKER_HEAP, *jvm])
    broker = Daemon.start(command, home / "broker.log")
    broker.wait_for("boot success")
    return broker


@contextlib.contextmanager
def second_apache(
    peer: Peer,
    home: Path,
    name: str,
    *,
    settings: Mapping[str, str] | None = None,
    jvm: Sequence[str] = SHIPPED_JVM,
) -> Iterator[str]:
    """One more broker of Apache's at the nameserver of a peer; yields its address."""
    port = free_ports(4) + 2
    lines = BROKER_SETTINGS.format(nameserver=peer.nameserver, port=port, store=home / "store")
    lines += _lines({"brokerName": name, **(settings or {})})
    peer.daemons[name] = _start_apache_broker(home, lines, jvm)
    try:
        register(peer.nameserver, f"{HOST}:{port}", START_TIMEOUT_S, _signer(settings))
        yield f"{HOST}:{port}"
    finally:
        peer.daemons.pop(name).kill()


@contextlib.contextmanager
def second_headrace(
    peer: Peer, home: Path, name: str, *, settings: Mapping[str, str] | None = None
) -> Iterator[str]:
    """One more broker of headrace at the nameserver of a peer; yields its address."""
    port = free_ports(1)
    more = {"storePathRootDir": str(home / "store"), **(settings or {})}
    peer.daemons[name] = _start_headrace_broker(home, name, port, peer.nameserver, more)
    try:
        peer.daemons[name].wait_for('"event": "registered"')
        yield f"{HOST}:{port}"
    finally:
        peer.daemons.pop(name).kill()


def _signer(settings: Mapping[str, str] | None) -> Signer | None:
    """Whoever the settings make a Super user."""
    if not settings or INIT_USER not in settings:
        return None
    user = json.loads(settings[INIT_USER])
    return user["username"], user["password"]


def _lines(settings: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def _apache_command(main: str, home: Path, settings: str, options: Sequence[str]) -> list[str]:
    path = home / f"{main}.conf"
    path.write_text(settings)
    return [
        "java",
        f"-Duser.home={home}",
        f"-Drocketmq.home.dir={home}",
        *options,
        *("-cp", f"{java_build() / 'lib'}/*"),
        f"org.apache.rocketmq.{main}",
        *("-c", str(path)),
    ]


BROKER_SETTINGS = f"""\
brokerClusterName=DefaultCluster
brokerName=broker-a
brokerId=0
brokerIP1={HOST}
namesrvAddr={{nameserver}}
listenPort={{port}}
storePathRootDir={{store}}
storePathCommitLog={{store}}/commitlog
brokerRole=ASYNC_MASTER
flushDiskType=ASYNC_FLUSH
defaultTopicQueueNums=8
waitTimeMillsInSendQueue=10000
diskMaxUsedSpaceRatio=95
"""

# waitTimeMillsInSendQueue: the default drops one-way sends that waited 200 ms, which happens when
# the machine is busy with something else.


def _start_headrace(
    home: Path,
    store: Path,
    daemons: dict[str, Daemon],
    more: Mapping[str, str] | None,
    of_nameserver: Mapping[str, str],
) -> Peer:
    if more is not None:
        return _start_headrace_daemons(home, store, daemons, more, of_nameserver)
    first = free_ports(5)
    command = [
        _headrace(),
        "dev",
        *("--data", str(store)),
        *("--log-file-mib", "1024"),  # as Apache's broker expects them
        *("--nameserver-port", str(first)),
        *("--broker-port", str(first + 3)),
    ]
    started = time.monotonic()
    daemons["broker"] = Daemon.start(command, home / "headrace.log")
    ready = daemons["broker"].wait_for(r"ready nameserver=(\S+) broker=(\S+) data=")
    return Peer("headrace", ready[1], ready[2], daemons, started)


def _start_headrace_daemons(
    home: Path,
    store: Path,
    daemons: dict[str, Daemon],
    more: Mapping[str, str],
    of_nameserver: Mapping[str, str],
) -> Peer:
    first = free_ports(5)
    started = time.monotonic()
    nameserver = _start_headrace_nameserver(home, first, daemons, of_nameserver)
    settings = {"storePathRootDir": str(store), **more}
    broker = _start_headrace_broker(home, "broker-a", first + 3, nameserver, settings)
    daemons["broker"] = broker
    return Peer("headrace", nameserver, f"{HOST}:{first + 3}", daemons, started)


@contextlib.contextmanager
def headrace_cluster(
    home: Path, brokers: Sequence[str], settings: Mapping[str, str]
) -> Iterator[Peer]:
    """A nameserver and brokers of these names, ready for clients; killed on leaving the block.

    home: folder for stores and output, which stays.
    settings: more lines of each broker's file.

    Returns the peer of the first broker.
    """
    first = free_ports(1 + len(brokers))
    daemons: dict[str, Daemon] = {}
    started = time.monotonic()
    try:
        nameserver = _start_headrace_nameserver(home, first, daemons, {})
        for port, name in enumerate(brokers, first + 1):
            settings = {**settings, "storePathRootDir": str(home / name)}
            daemons[name] = _start_headrace_broker(home, name, port, nameserver, settings)
        for name in brokers:
            wait_for_route(nameserver, START_TIMEOUT_S, topic=name)
        yield Peer("headrace", nameserver, f"{HOST}:{first + 1}", daemons, started)
    finally:
        for daemon in daemons.values():
            daemon.kill()


def _start_headrace_nameserver(
    home: Path, port: int, daemons: dict[str, Daemon], settings: Mapping[str, str]
) -> str:
    path = home / "nameserver.conf"
    kept = str(home / "nameserver" / "kvConfig.json")
    path.write_text(_lines({"listenPort": str(port), "kvConfigPath": kept, **settings}))
    command = [_headrace(), "nameserver", "-c", str(path)]
    daemons["nameserver"] = Daemon.start(command, home / "nameserver.log")
    return f"{HOST}:{port}"


def _start_headrace_broker(
    home: Path, name: str, port: int, nameserver: str, more: Mapping[str, str]
) -> Daemon:
    settings = {
        "brokerName": name,
        "bindAddress": HOST,
        "listenPort": str(port),
        "fastListenPort": "0",
        "namesrvAddr": nameserver,
        **more,
    }
    path = home / f"{name}.conf"
    path.write_text(_lines(settings))
    return Daemon.start([_headrace(), "broker", "-c", str(path)], home / f"{name}.log")


def _headrace() -> str:
    program = Path(sys.executable).with_name("headrace")
    if not program.exists():
        raise PeerError(f"{program} does not exist: run `make setup`")
    return str(program)


def free_ports(count: int) -> int:
    """First of ``count`` neighbouring ports that nobody listens on."""
    while True:
        first = random.randrange(PORTS.start, PORTS.stop - count)
        if all(_is_free(first + step) for step in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
