"""``headrace consume``: prints a topic's messages."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.admin.options import Json, Nameserver
from headrace.admin.places import HELP, Place, parse_place
from headrace.errors import ConfigurationError, HeadraceError
from headrace_daemon.command import warn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import trio

    from headrace.consumer.pull import PullConsumer
    from headrace.consumer.push import Consumer
    from headrace.messages import MessageBatch, ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

_CHECK_S = 0.25


def consume(
    topic: Annotated[str, typer.Argument(help="The topic to read.")],
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Wait for more messages instead of stopping at the end."
        ),
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(help="Join this group: share its queues with other members, and commit."),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", help=f"{HELP}. A group resumes from its committed offset.")
    ] = "earliest",
    queue: Annotated[
        list[int] | None,
        typer.Option(help="Read only this queue id; may be repeated; not with --group."),
    ] = None,
    tags: Annotated[
        str, typer.Option(help="Only messages with these tags, e.g. 'paid || shipped'.")
    ] = "*",
    count: Annotated[
        int | None, typer.Option("--max", min=1, help="Stop after this many messages.")
    ] = None,
    as_json: Json = False,
    nameserver: Nameserver = None,
) -> None:
    """Print messages: one body per line, or all fields of each message with --json."""
    import trio

    from headrace.messages import check_topic

    check_topic(topic)
    place = parse_place(start)
    printer = _Printer(count, as_json=as_json)
    if group is None:
        reader = _Reader(topic, place, queue or [], tags, printer, follow=follow)
        trio.run(reader.run, nameserver)
        return
    if queue or isinstance(place, int):
        raise ConfigurationError(
            "--queue and an offset cannot be combined with --group, whose members share the queues "
            "and their progress; to move the group, see `headrace group reset`"
        )
    member = _Member(topic, group, place, tags, printer, follow=follow)
    trio.run(member.run, nameserver)


class _Printer:
    """Prints messages up to a maximum count."""

    def __init__(self, count_max: int | None, *, as_json: bool) -> None:
        self._left = count_max
        self._as_json = as_json

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def print(self, message: ReceivedMessage) -> None:
        from headrace.admin.messages import print_message

        print_message(message, as_json=self._as_json)
        if self._left is not None:
            self._left -= 1


class _Reader:
    """Reads queues without a group, so nothing is committed."""

    def __init__(
        self,
        topic: str,
        place: Place,
        queue_ids: Sequence[int],
        tags: str,
        printer: _Printer,
        *,
        follow: bool,
    ) -> None:
        self._topic = topic
        self._place = place
        self._queue_ids = queue_ids
        self._tags = tags
        self._printer = printer
        self._follow = follow

    async def run(self, nameserver: str | None) -> None:
        """Print until the maximum count or the end of the queues is reached."""
        from headrace.consumer.pull import PullConsumer

        place = self._place
        start = "earliest" if isinstance(place, int) else place
        async with PullConsumer(nameserver=nameserver, start=start) as consumer:
            queues = self._choose(await consumer.queues(self._topic))
            ends = await _ends(consumer, queues)
            await consumer.assign(ends, self._tags)
            if isinstance(place, int):
                for queue in ends:
                    consumer.seek(queue, place)
            while not self._printer.is_done and (self._follow or _is_open(consumer, ends)):
                batch = await consumer.receive_many(timeout_ms=_CHECK_S * 1000)
                if batch:
                    self._print(batch, ends[batch.queue])

    def _choose(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        if not self._queue_ids:
            return list(queues)
        absent = set(self._queue_ids) - {queue.queue_id for queue in queues}
        if absent:
            raise ConfigurationError(
                f"topic {self._topic} has no queue {min(absent)}; see `headrace topic describe`"
            )
        return [queue for queue in queues if queue.queue_id in self._queue_ids]

    def _print(self, batch: MessageBatch, end: int) -> None:
        for message in batch:
            if self._printer.is_done or not (self._follow or message.queue_offset < end):
                break
            self._printer.print(message)
        sys.stdout.flush()


async def _ends(consumer: PullConsumer, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
    """The current end of each queue. Brokers that don't answer are left out with a warning.

    Raises the first broker's error if none answers.
    """
    from headrace.tasks import gather

    async def ends_at(broker_name: str) -> dict[MessageQueue, int]:
        its_queues = [queue for queue in queues if queue.broker_name == broker_name]
        return {queue: await consumer.max_offset(queue) for queue in its_queues}

    names = sorted({queue.broker_name for queue in queues})
    outcomes = dict(zip(names, await gather(ends_at, names), strict=True))
    failed = {name: each for name, each in outcomes.items() if isinstance(each, HeadraceError)}
    if failed and len(failed) == len(names):
        raise failed[names[0]]
    for name, error in failed.items():
        warn(f"skipped broker {name}: {error}")
    found = [each for each in outcomes.values() if not isinstance(each, HeadraceError)]
    return {queue: end for ends in found for queue, end in ends.items()}


def _is_open(consumer: PullConsumer, ends: dict[MessageQueue, int]) -> bool:
    return any(consumer.position(queue) < end for queue, end in ends.items())


class _Member:
    """Reads as a member of a group."""

    def __init__(
        self,
        topic: str,
        group: str,
        place: Place,
        tags: str,
        printer: _Printer,
        *,
        follow: bool,
    ) -> None:
        self._topic = topic
        self._group = group
        self._place = place
        self._tags = tags
        self._printer = printer
        self._follow = follow
        self._is_interrupted = False

    async def run(self, nameserver: str | None) -> None:
        """Print until the maximum count, or until all messages that existed at first are read."""
        import trio

        from headrace.consumer.pull import PullConsumer
        from headrace.consumer.push import Consumer

        # From here on, a signal cannot prevent the commit of messages already printed.
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with (
                PullConsumer(self._group, nameserver=nameserver) as offsets,
                Consumer(
                    self._group, {self._topic: self._tags}, nameserver=nameserver, start=self._place
                ) as consumer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(self._stop_at_signal, signals, nursery.cancel_scope)
                if not self._follow:
                    nursery.start_soon(self._stop_at_end, consumer, offsets, nursery.cancel_scope)
                async for message in consumer:
                    self._printer.print(message)
                    sys.stdout.flush()
                    if self._printer.is_done:
                        break
                nursery.cancel_scope.cancel()
        if self._is_interrupted:
            raise KeyboardInterrupt

    async def _stop_at_signal(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        """Leave the group cleanly at a signal, so that printed messages are committed."""
        async for _ in signals:
            self._is_interrupted = True
            scope.cancel()

    async def _stop_at_end(
        self, consumer: Consumer, offsets: PullConsumer, scope: trio.CancelScope
    ) -> None:
        import trio

        queues = await offsets.queues(self._topic)
        ends = {queue: await offsets.max_offset(queue) for queue in queues}
        while True:
            if await self._is_at_end(consumer, offsets, ends):
                scope.cancel()
            await trio.sleep(_CHECK_S)

    async def _is_at_end(
        self, consumer: Consumer, offsets: PullConsumer, ends: dict[MessageQueue, int]
    ) -> bool:
        await consumer.commit()
        for queue in consumer.assignment:
            end = ends.get(queue, 0)
            if end and (await offsets.committed(queue) or 0) < end:
                return False
        return True
