"""The clients without an event loop, against a real broker."""

# ruff: noqa: PT012 - what blocks raise after a few statements is the point here

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import trio

import headrace
from headrace import Message, blocking
from headrace.admin.groups import member_ids
from headrace.embedded import Embedded
from headrace.errors import ClientClosed, ConfigurationError, InvalidMessage, RouteNotFound
from headrace.producer.pipeline import Pipeline
from tests.support.until import wait_until
from tests.support.verbs import lag_at


def options(mq: Embedded) -> dict[str, Any]:
    return {"nameserver": mq.nameserver}


def produce(mq: Embedded, topic: str, count: int) -> None:
    with blocking.Admin(**options(mq)) as admin:
        admin.create_topic(topic, queues=2)
    with blocking.Producer(**options(mq)) as producer, producer.pipeline() as pipeline:
        pipeline.send_all(Message(topic, b"%d" % number) for number in range(count))


def test_sending_and_consuming(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        assert producer.group == "headrace_producer"
        result = producer.send(Message("Plain", b"hello", key="k"))
        assert result.queue in producer.queues("Plain")
        producer.send_many([Message("Plain", b"again", key="k")])
    with blocking.Consumer("g", "Plain", start="earliest", **options(mq)) as consumer:
        assert [message.body for message in islice(consumer, 2)] == [b"hello", b"again"]


IN_TRIO = "is called in a task of trio"
OPENED: list[Callable[..., Any]] = [
    blocking.Admin,
    blocking.Producer,
    blocking.PullConsumer,
    partial(blocking.Consumer, "g", "InTrio"),
    partial(blocking.SimpleConsumer, "g", "InTrio"),
    partial(blocking.Table, "InTrio"),
]


@pytest.mark.parametrize("opened", OPENED)
async def test_a_client_is_not_opened_in_a_task_of_trio(opened: Callable[..., Any]) -> None:
    """Not even begun: its thread would wait for an end that trio lets no task ask for."""
    client = opened(nameserver="127.0.0.1:1")
    threads = threading.active_count()
    with pytest.raises(
        ConfigurationError, match=f"this blocking {type(client).__name__} {IN_TRIO}"
    ):
        client.start()
    assert threading.active_count() == threads


def test_a_client_that_is_open_is_not_used_in_a_task_of_trio(mq: Embedded) -> None:
    produce(mq, "InTrio", 1)
    message = Message("InTrio", b"x")
    with blocking.Producer(**options(mq)) as producer, producer.pipeline() as pipeline:
        later = producer.pipeline()
        calls: list[Callable[[], object]] = [
            partial(producer.send, message),
            partial(pipeline.send, message),
            producer.pipeline,
            later.start,
            pipeline.stop,
            producer.stop,
        ]

        async def use() -> None:
            for call in calls:
                with pytest.raises(ConfigurationError, match=IN_TRIO):
                    call()
            await trio.to_thread.run_sync(producer.send, message)

        trio.run(use)
        producer.send(message)


def test_what_was_processed_does_not_come_again(mq: Embedded) -> None:
    produce(mq, "Once", 100)
    numbers = []
    for _ in range(4):
        with blocking.Consumer("g", "Once", start="earliest", **options(mq)) as consumer:
            for message in consumer:
                numbers.append(int(message.body))
                if len(numbers) % 25 == 0:
                    break
    assert sorted(numbers) == list(range(100))


def test_a_message_whose_handler_failed_comes_again(mq: Embedded) -> None:
    produce(mq, "Failed", 3)
    with (
        pytest.raises(KeyError),
        blocking.Consumer("g", "Failed", start="earliest", **options(mq)) as consumer,
    ):
        for message in consumer:
            first = message.body
            raise KeyError
    with blocking.Consumer("g", "Failed", start="earliest", **options(mq)) as consumer:
        assert first in {message.body for message in islice(consumer, 3)}


def test_batches_and_commits(mq: Embedded) -> None:
    produce(mq, "Batches", 50)
    count = 0
    with blocking.Consumer("g", "Batches", start="earliest", **options(mq)) as consumer:
        assert sum(queue.topic == "Batches" for queue in consumer.assignment) == 2
        for batch in consumer.batches(max_messages=10):
            assert len(batch) <= 10
            count += len(batch)
            if count == 50:
                break
        consumer.commit()
    assert lag_at(mq.nameserver, "g", "Batches") == 0


def test_messages_are_returned_without_await(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        producer.send_many([b"retried", b"rejected"], topic="returns")
    with blocking.Consumer("g-returns", "returns", **options(mq), retry_delay=1) as consumer:
        seen = []
        for message in consumer:
            seen.append((message.body, message.reconsume_times))
            if message.body == b"rejected":
                message.reject()
            elif not message.reconsume_times:
                message.retry()
            if len(seen) == 3:
                break
    assert sorted(seen) == [(b"rejected", 0), (b"retried", 0), (b"retried", 1)]
    with blocking.Consumer("undertaker", "%DLQ%g-returns", **options(mq)) as consumer:
        batch = consumer.receive(timeout_ms=5000)
        assert batch
        assert batch.values() == [b"rejected"]


def test_queues_by_hand(mq: Embedded) -> None:
    produce(mq, "Pull", 20)
    with blocking.PullConsumer(**options(mq)) as consumer:
        queues = consumer.queues("Pull")
        consumer.assign(queues[:1])
        count = len(consumer.receive_many() or ())
        consumer.seek(queues[0], 0)
        assert len(consumer.receive_many() or ()) == count == consumer.max_offset(queues[0])
        assert consumer.receive_many(timeout_ms=1) is None


def test_until_ends_a_loop_after_its_time(mq: Embedded) -> None:
    produce(mq, "Until", 10)
    with blocking.Consumer("g", "Until", start="earliest", **options(mq)) as consumer:
        numbers = [int(message.body) for message in consumer.until(timeout_ms=300)]
        assert sorted(numbers) == list(range(10))
        assert list(consumer.until(timeout_ms=0)) == []
        with pytest.raises(ConfigurationError, match="timeout_ms=-1"):
            next(consumer.until(timeout_ms=-1))
    assert lag_at(mq.nameserver, "g", "Until") == 0


def test_until_hands_out_nothing_after_its_time(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(mq, "Late", 10)
    with blocking.Consumer("g", "Late", start="earliest", **options(mq)) as consumer:
        clock = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        numbers = []
        for message in consumer.until(timeout_ms=60_000):
            numbers.append(int(message.body))
            clock[0] += 20
        assert len(numbers) == 3
        # A new loop resumes where the last one ended.
        numbers += [int(message.body) for message in islice(consumer, 7)]
    assert sorted(numbers) == list(range(10))


def test_receive_has_a_limit_in_messages_and_in_time(mq: Embedded) -> None:
    produce(mq, "Receive", 10)
    numbers: list[int] = []
    with blocking.Consumer("g", "Receive", start="earliest", **options(mq)) as consumer:
        while batch := consumer.receive(3, timeout_ms=300):
            assert 1 <= len(batch) <= 3
            numbers += map(int, batch.values())
        assert sorted(numbers) == list(range(10))
    assert lag_at(mq.nameserver, "g", "Receive") == 0


PAIRS: list[tuple[type, type]] = [
    (blocking.Producer, headrace.Producer),
    (blocking.Pipeline, Pipeline),
    (blocking.Consumer, headrace.Consumer),
    (blocking.PullConsumer, headrace.PullConsumer),
    (blocking.Admin, headrace.Admin),
]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=[kind.__name__ for kind, _ in PAIRS])
def test_a_blocking_client_has_all_that_the_async_one_has(ours: type, theirs: type) -> None:
    # That is for connections.
    assert public(theirs) - public(ours) <= {"answered"}
    for name in public(theirs) & public(ours):
        theirs_one, ours_one = getattr(theirs, name), getattr(ours, name)
        assert inspect.getdoc(ours_one), name
        if callable(theirs_one):
            expected = inspect.signature(theirs_one).parameters
            assert inspect.signature(ours_one).parameters.keys() == expected.keys(), name
    if ours is not blocking.Pipeline:
        assert inspect.signature(ours) == inspect.signature(theirs)


def test_messages_by_the_thousand(mq: Embedded) -> None:
    produce(mq, "Many", 5000)
    with blocking.PullConsumer(**options(mq)) as consumer:
        consumer.assign(consumer.queues("Many"))
        first = consumer.receive_many(max_messages=10)
        assert first is not None
        assert len(first) == len(first.values()) == 10
        assert consumer.position(first.queue) == 10
    with blocking.Consumer("g", "Many", start="earliest", **options(mq)) as consumer:
        numbers = [int(message.body) for message in islice(consumer, 5000)]
    assert sorted(numbers) == list(range(5000))
    with blocking.Admin(**options(mq)) as admin:
        # The last message is at hand when the block is left without an exception.
        assert sum(queue.lag for queue in admin.lag("g", "Many")) == 0


class Interrupted(BaseException):
    """As the handler of a signal raises it."""


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """The main thread is, a moment later, wherever it waits."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGALRM))
    timer.start()
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGALRM, before)


def test_the_block_can_be_left_after_an_interrupted_call(mq: Embedded) -> None:
    produce(mq, "Interrupted", 0)
    with blocking.PullConsumer(**options(mq)) as consumer:
        consumer.assign(consumer.queues("Interrupted"))
        with interrupted():
            consumer.receive_many()
    with pytest.raises(ClientClosed):
        consumer.receive_many()


def test_a_client_has_one_block_at_a_time(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        with pytest.raises(ConfigurationError, match="already open"):
            producer.__enter__()
        pipeline = producer.pipeline()
        with pytest.raises(ClientClosed, match=r"`with producer\.pipeline"):
            pipeline.send(Message("Plain", b"x"))
        with pipeline:
            pipeline.send(Message("Plain", b"x"))
    producer.__exit__(None, None, None)
    with pytest.raises(ClientClosed, match="`with Producer"):
        pipeline.send(Message("Plain", b"x"))


def test_errors_are_the_async_clients(mq: Embedded) -> None:
    with blocking.Producer(**options(mq)) as producer:
        with pytest.raises(InvalidMessage):
            producer.send(Message("T", b""))
        with pytest.raises(InvalidMessage), producer.pipeline() as pipeline:
            pipeline.send(Message("T", b""))
    with pytest.raises(ClientClosed):
        producer.send(Message("T", b"x"))
    with (
        pytest.raises(RouteNotFound),
        blocking.Consumer("g", "Missing", **options(mq)),
    ):
        pass
    with pytest.raises(AttributeError):
        _ = producer.nonsense  # type: ignore[attr-defined]


# -- threads ---------------------------------------------------------------------------------------


def iterations(consumer: blocking.Consumer) -> dict[str, Iterator[Any]]:
    return {
        "for": iter(consumer),
        "until": consumer.until(timeout_ms=60_000),
        "batches": consumer.batches(max_messages=1),
        "receive": iter(partial(consumer.receive, 1), None),
    }


@pytest.mark.parametrize("way", ["for", "until", "batches", "receive"])
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "busy"])
def test_closing_in_another_thread_ends_a_loop(mq: Embedded, way: str, *, waits: bool) -> None:
    topic = f"Ended_{way}_{waits}"
    produce(mq, topic, 2)
    consumer = blocking.Consumer("g", topic, start="earliest", **options(mq)).start()
    closing = threading.Thread(target=consumer.stop)
    seen = 0
    for _ in iterations(consumer)[way]:
        seen += 1
        if seen == 2:
            # The loop asks for the third before or after the end.
            closing.start()
            if not waits:
                wait_until(lambda: not consumer._client._inbox._is_open)
    closing.join()
    assert seen == 2
    assert lag_at(mq.nameserver, "g", topic) == 0
    with pytest.raises(ClientClosed, match="use it inside `with Consumer"):
        next(iter(consumer))


def test_closing_in_another_thread_ends_the_changes_of_a_table(mq: Embedded) -> None:
    with blocking.Admin(**options(mq)) as admin:
        admin.create_topic("Changing", queues=1)
    table = blocking.Table("Changing", **options(mq)).start()
    changes = table.changes()
    table.put("k", b"v")
    assert next(changes).key == "k"
    closing = threading.Timer(0.05, table.stop)
    closing.start()
    assert list(changes) == []
    closing.join()


def test_threads_share_a_consumer_as_tasks_do(mq: Embedded) -> None:
    produce(mq, "Shared", 40)
    bodies: list[bytes] = []
    # Passed only if each thread holds a message.
    all_have_one = threading.Barrier(8)
    with blocking.Consumer("g", "Shared", start="earliest", **options(mq)) as consumer:

        def work() -> None:
            for index, message in enumerate(consumer):
                bodies.append(message.body)
                if index == 0:
                    all_have_one.wait(20)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(bodies) == 40)
        consumer.stop()
        for thread in threads:
            thread.join()
    assert sorted(map(int, bodies)) == list(range(40))
    assert lag_at(mq.nameserver, "g", "Shared") == 0


# -- processes -------------------------------------------------------------------------------------


def in_child(function: Callable[[], object]) -> str:
    """The outcome of a function in a forked child: the repr of its result or error."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of processes with threads
        child = os.fork()
    if child == 0:
        try:
            text = repr(function())
        except BaseException as error:  # noqa: BLE001 - the parent asserts on it
            text = repr(error)
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        text = file.read().decode()
    assert os.waitpid(child, 0) == (child, 0)
    return text


def test_a_forked_child_is_refused_at_once(mq: Embedded) -> None:
    produce(mq, "Forked", 10)
    message = Message("Forked", b"x", key="k")
    with (
        blocking.Producer(**options(mq)) as producer,
        producer.pipeline() as pipeline,
        blocking.Table("Forked", **options(mq)) as table,
        blocking.Consumer("g", "Forked", start="earliest", **options(mq)) as consumer,
    ):
        table.synced()
        messages = iter(consumer)
        next(messages)
        calls: list[Callable[[], object]] = [
            lambda: producer.send(message),
            producer.pipeline,
            lambda: pipeline.send(message),
            lambda: table["k"],
            lambda: table.get("k"),
            consumer.commit,
            consumer.start,
        ]
        for call in calls:
            assert in_child(call).startswith("OpenedBeforeFork")
        # Nor does it process the messages that its parent has been handed out.
        assert in_child(lambda: next(messages)).startswith("OpenedBeforeFork")
        assert in_child(producer.stop) == "None"
        assert in_child(lambda: send_with_another(mq)).startswith("SendResult")
        assert len(list(islice(messages, 9))) == 9


def send_with_another(mq: Embedded) -> object:
    with blocking.Producer(**options(mq)) as producer:
        return producer.send(Message("Forked", b"x"))


def test_each_child_of_a_process_that_creates_a_client_is_a_member_of_its_own(
    mq: Embedded,
) -> None:
    produce(mq, "Members", 0)
    consumer = blocking.Consumer("members", "Members", **options(mq))

    def client_ids() -> list[str]:
        with consumer, blocking.Admin(**options(mq)) as admin:
            return member_ids(admin.members("members"))

    ids = {in_child(client_ids), in_child(client_ids), repr(client_ids())}
    assert len(ids) == 3


ENDINGS = {
    "after the last statement": "",
    "after an uncaught exception": "raise ValueError('a bug')",
    "by sys.exit": "sys.exit(0)",
}
LEFT_OPEN = """
import sys
from headrace import Message, blocking
producer = blocking.Producer().start()
producer.send(Message("Left", b"0", key="k"))
pipeline = producer.pipeline(on_result=lambda message, result: print(result)).start()
pipeline.send(Message("Left", b"1", key="k"))
transaction = producer.transaction("Left").start()
transaction.send(Message("Left", b"never", key="k"))
def bodies():
    with blocking.Consumer("g", "Left") as consumer:
        for message in consumer:
            yield message.body
values = bodies()
next(values)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_whatever_it_leaves_open(mq: Embedded, ending: str) -> None:
    produce(mq, "Left", 0)
    environment = {**os.environ, "HEADRACE_NAMESERVER": mq.nameserver}
    program = [sys.executable, "-c", LEFT_OPEN + ENDINGS[ending]]
    ran = subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == ("ValueError" in ENDINGS[ending])
    assert ("ValueError: a bug" in ran.stderr) == ("ValueError" in ENDINGS[ending])
    assert ran.stderr.count("was still open when the program ended") == 4
    assert "queue_offset=1" in ran.stdout, "a pipeline sends what it has accepted"
    with blocking.Consumer("g", "Left", **options(mq)) as consumer:
        # The current message comes again; that of the transaction never comes.
        found = [message.body for message in islice(consumer, 2)]
        assert found == [b"0", b"1"]
        assert consumer.receive(timeout_ms=0) is None
    with blocking.Admin(**options(mq)) as admin:
        admin.delete_topic("Left")
        admin.delete_group("g")


@pytest.mark.parametrize(("library", "is_refused"), [("gevent._socket3", True), ("socks", False)])
def test_patched_modules_are_refused_where_greenlets_are_behind_them(
    mq: Embedded, monkeypatch: pytest.MonkeyPatch, library: str, *, is_refused: bool
) -> None:
    class Patched(socket.socket):
        __slots__ = ()

    Patched.__module__ = library
    producer = blocking.Producer(**options(mq))
    monkeypatch.setattr("socket.socket", Patched)
    if is_refused:
        words = r"gevent has replaced socket\.socket.* gthread"
        with pytest.raises(ConfigurationError, match=words):
            producer.start()
        monkeypatch.undo()
    with producer:
        producer.send(Message("Plain", b"x"))


def test_a_function_in_the_loop_s_thread_cannot_call_its_client(mq: Embedded) -> None:
    errors: list[str] = []

    def on_result(*_: object) -> None:
        for call in (partial(producer.send, Message("Plain", b"again")), producer.stop):
            with pytest.raises(ConfigurationError) as caught:
                call()
            errors.append(str(caught.value))

    with (
        blocking.Producer(**options(mq)) as producer,
        producer.pipeline(on_result=on_result) as pipeline,
    ):
        pipeline.send(Message("Plain", b"x"))
    assert len(errors) == 2
    assert all("on_result" in error and "another thread" in error for error in errors)


@pytest.mark.parametrize("name", ["on_assigned", "on_revoked"])
def test_async_functions_of_a_blocking_member_are_refused(mq: Embedded, name: str) -> None:
    async def hear(_: object) -> None: ...

    given: dict[str, Any] = {name: hear}
    with pytest.raises(ConfigurationError, match=f"{name} is an async function"):
        blocking.Consumer("g", "Plain", **given, **options(mq))
