"""Writers and readers, each a thread that works until it is stopped, whatever is away."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random

from headrace import Message
from headrace.blocking import Consumer, Producer, PullConsumer, Table
from headrace.errors import HeadraceError
from tests.chaos.ledger import Ledger, LogBook
from tests.support import processes

PLAIN, STATIC, COMPACTED = "ChaosPlain", "ChaosStatic", "ChaosKeys"
TOPICS = (PLAIN, STATIC)
GROUP = "chaos_readers"
KEYS = 200
RATE = 20.0
LOOKUP_S = 0.2
COMMAND_S = 3.0
COMMAND_TIMEOUT_S = 120.0
DELIVERY_MS = 10_000
ANSWER_LINES_MAX = 10
PADDING = b" " + b"x" * 400
NOT_FOUND = 3


class Workers:
    """Threads that end together; what one of them can't stand is a violation."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - reported at the end
                self.ledger.violate(f"{name} ended: {type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self, patience_s: float) -> None:
        """Let each end its turn."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(patience_s)
            if thread.is_alive():
                self.ledger.violate(f"{thread.name} does not end")

    def each(self, seconds: float) -> Iterator[int]:
        """Numbers, one every so many seconds, until the end."""
        for number in count():
            if self.stopping.wait(seconds):
                return
            yield number


class Scene:
    """The cluster as clients see it, and what they know of it."""

    def __init__(self, nameserver: str, ledger: Ledger, book: LogBook, seed: int) -> None:
        self.nameserver = nameserver
        self.ledger = ledger
        self.book = book
        self.seed = seed

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str] | None:
        """Run a command; None if it takes too long."""
        try:
            done = processes.run(
                *arguments, nameserver=self.nameserver, timeout_s=COMMAND_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            self.ledger.violate(f"headrace {' '.join(arguments)} does not end")
            return None
        # What a command says is its answer to a person, not a log; but it must be short.
        if "Traceback" in done.stderr or done.stderr.count("\n") > ANSWER_LINES_MAX:
            self.ledger.violate(f"headrace {' '.join(arguments)}: {done.stderr[-2000:]}")
        return done


def name_of(body: bytes) -> str:
    """The name of a message."""
    return body.split(b" ")[0].decode()


# -- writers ---------------------------------------------------------------------------------------


def write(scene: Scene, workers: Workers, topic: str) -> None:
    """Messages of a topic; those of a static topic have keys."""
    with Producer(nameserver=scene.nameserver, delivery_timeout_ms=DELIVERY_MS) as producer:
        for number in workers.each(1 / RATE):
            name = f"{topic}-{number}"
            key = f"k{number % KEYS}" if topic == STATIC else ""
            try:
                producer.send(Message(topic, name.encode() + PADDING, key=key))
            except HeadraceError:
                scene.ledger.count(f"failed sends to {topic}")
            else:
                scene.ledger.acknowledge(topic, name)


def put(scene: Scene, workers: Workers) -> None:
    """Versions of keys, each key's ascending."""
    rng = Random(scene.seed)
    with _table(scene, is_local=False) as table:
        for version in workers.each(1 / RATE):
            key = f"key-{rng.randrange(KEYS)}"
            try:
                table.put(key, str(version))
            except HeadraceError:
                scene.ledger.count("failed puts")
            else:
                scene.ledger.acknowledge_version(key, version)


@contextmanager
def _table(scene: Scene, *, is_local: bool) -> Iterator[Table[str]]:
    with Table(
        COMPACTED,
        model=str,
        local=is_local,
        nameserver=scene.nameserver,
        delivery_timeout_ms=DELIVERY_MS,
    ) as table:
        yield table


# -- readers ---------------------------------------------------------------------------------------


class Group:
    """A member of a group that reads both topics."""

    def __init__(self, scene: Scene) -> None:
        self.read: set[str] = set()
        self.consumer = Consumer(GROUP, list(TOPICS), nameserver=scene.nameserver, start="earliest")

    def run(self) -> None:
        for batch in self.consumer.batches():
            self.read.update(map(name_of, batch.values()))


def look_up(scene: Scene, workers: Workers, *, is_local: bool) -> None:
    """Values of keys, in a local copy or at the brokers."""
    rng = Random(scene.seed + is_local)
    reader = "local table" if is_local else "table"
    with _table(scene, is_local=is_local) as table:
        for _ in workers.each(LOOKUP_S):
            key = f"key-{rng.randrange(KEYS)}"
            floor = scene.ledger.versions().get(key, 0)
            try:
                if is_local:
                    table.synced()
                value = table.get(key)
            except HeadraceError:
                scene.ledger.count(f"failed lookups of the {reader}")
            else:
                scene.ledger.check_value(reader, key, floor, value)
                scene.ledger.count(f"lookups of the {reader}")


def run_commands(scene: Scene, workers: Workers) -> None:
    """The command line, which reads a topic to its end or looks up a key."""
    rng = Random(scene.seed)
    for number in workers.each(COMMAND_S):
        if number % 2:
            get_by_command(scene, f"key-{rng.randrange(KEYS)}")
        else:
            consume_by_command(scene, TOPICS[number // 2 % 2])


def consume_by_command(scene: Scene, topic: str) -> bool:
    """True if it could read the topic."""
    wanted = scene.ledger.acknowledged(topic)
    done = scene.run("consume", topic, "--format", r"%s\n")
    if done is None or done.returncode:
        scene.ledger.count(f"consume {topic} with exit code {done.returncode if done else None}")
        return False
    read = {line.split(" ")[0] for line in done.stdout.splitlines()}
    scene.ledger.check_names(f"headrace consume {topic}", wanted, read)
    scene.ledger.count(f"consume {topic}")
    return True


def get_by_command(scene: Scene, key: str) -> bool:
    """True if it could tell."""
    floor = scene.ledger.versions().get(key, 0)
    done = scene.run("kv", "get", COMPACTED, key)
    if done is None or done.returncode not in {0, NOT_FOUND}:
        scene.ledger.count("failed kv get")
        return False
    value = done.stdout.strip() if done.returncode == 0 else None
    scene.ledger.check_value(f"headrace kv get ({done.stderr.strip()})", key, floor, value)
    scene.ledger.count("kv get")
    return True


# -- at the end ------------------------------------------------------------------------------------


def read_all(scene: Scene, topic: str, patience_s: float) -> set[str]:
    """All messages of a topic, from its start, by a reader without a group."""
    read: set[str] = set()
    wanted = scene.ledger.acknowledged(topic)
    with PullConsumer(nameserver=scene.nameserver) as consumer:
        consumer.assign(consumer.queues(topic))
        consumer.seek_to("earliest")
        until = scene.book.now() + patience_s
        while scene.book.now() < until and not wanted <= read:
            batch = consumer.receive_many(timeout_ms=1000)
            read.update(map(name_of, batch.values()) if batch else ())
    return read


def check_keys(scene: Scene) -> None:
    """Each key by both tables and, all at once, by the command line."""
    wanted = scene.ledger.versions()
    for is_local in (False, True):
        with _table(scene, is_local=is_local) as table:
            if is_local:
                table.synced()
            values = table.get_many(wanted)
        for key, floor in wanted.items():
            scene.ledger.check_value(f"last look of local={is_local}", key, floor, values.get(key))
