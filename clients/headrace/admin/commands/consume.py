"""``headrace consume``: prints a topic's messages."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from headrace.admin import completion, options
from headrace.admin.end_reader import EndReader
from headrace.admin.goal import Goal, PartialRead, all_queues, wait_for_topic
from headrace.admin.messages import FORMAT_HELP
from headrace.admin.points import HELP, Point, parse_point, parse_time
from headrace.errors import ConfigurationError, HeadraceError
from headrace.whole import require_whole
from headrace_daemon.command import warn
from headrace_protocol.pop.headers import POP_MESSAGES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    import trio

    from headrace.admin.interrupts import Interrupts
    from headrace.consumer.pull import PullConsumer
    from headrace.consumer.push import Consumer
    from headrace.consumer.simple import SimpleConsumer
    from headrace.consumer.subscription import Choice
    from headrace.received import MessageBatch, ReceivedMessage
    from headrace_protocol.bodies import MessageQueue

_CHECK_S = 0.25
# Without --follow, messages are taken out until none has come for so long.
_QUIET_S = 2.0
_ACK_S = 5.0


@options.command(
    "consume",
    "headrace consume orders --from 15m --tag paid --tag shipped --json",
    "headrace consume orders --tail 5 --follow",
    """headrace consume orders --filter "price > 5 AND region = 'EU'\"""",
    r"headrace consume orders --key 4711 --format '%q\t%o\t%T\t%s\n'",
    "headrace consume orders --group warehouse --max 10",
    "headrace consume emails --group mailer --pop",
)
@click.argument("topic", metavar="TOPIC", shell_complete=completion.topics)
@click.option(
    "--follow", "-f", is_flag=True, help="Wait for more messages instead of stopping at the end."
)
@click.option(
    "--group",
    metavar="GROUP",
    shell_complete=completion.groups,
    help="Join this group: share its queues with other members, and commit.",
)
@click.option(
    "--pop",
    "pops",
    is_flag=True,
    help="Take messages out for the group and acknowledge them, as a SimpleConsumer does; "
    f"without -f, until none has come for {_QUIET_S:g} s.",
)
@click.option(
    "--from",
    "start",
    metavar="PLACE",
    help=f"{HELP}. Default: earliest. A group resumes from its committed offset.",
)
@click.option(
    "--until", metavar="TIME", help="Only messages stored until a time or an age: 2026-11-21, 2h."
)
@click.option(
    "--tail",
    type=click.IntRange(min=1),
    metavar="MESSAGES",
    help="Only the topic's last messages, by store time.",
)
@click.option(
    "--queue",
    type=int,
    multiple=True,
    metavar="QUEUE",
    help="Read only this queue id; may be repeated; not with --group.",
)
@click.option(
    "--tag",
    "-t",
    "tags",
    multiple=True,
    metavar="TAG",
    help="Only messages with this tag; may be repeated, or be several: paid,shipped.",
)
@click.option(
    "--filter",
    "sql",
    metavar="CONDITION",
    help='Only messages whose properties meet this SQL92 condition: "price > 5"; not with --tag.',
)
@click.option("--key", "-k", metavar="KEY", help="Only messages with this key.")
@click.option(
    "--max",
    "count",
    type=click.IntRange(min=1),
    metavar="MESSAGES",
    help="Stop after this many messages.",
)
@click.option(
    "--format",
    "template",
    metavar="FORMAT",
    help=f"What to print of each message: {FORMAT_HELP}. Values are escaped.",
)
@options.allow_partial
@options.answer
@click.pass_obj
def command(
    patience: options.Patience,
    topic: str,
    group: str | None,
    start: str | None,
    until: str | None,
    tail: int | None,
    queue: tuple[int, ...],
    tags: tuple[str, ...],
    sql: str | None,
    key: str | None,
    count: int | None,
    template: str | None,
    nameserver: str | None,
    *,
    follow: bool,
    pops: bool,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """Print a topic's messages.

    Prints one body per line, or with --json all fields of each message, or a --format.
    """
    import trio

    point, choice = parse_point(start or "earliest"), _choice(topic, tags, sql)
    wanted = _Wanted(topic, point, choice, patience, follow, allow_partial)
    printer = _Printer(count, _print_function(template, as_json=as_json))
    if group is None:
        if pops:
            raise ConfigurationError("--pop requires --group: messages are taken out for a group")
        if tail and start:
            raise ConfigurationError("--tail cannot be combined with --from")
        if until and follow:
            raise ConfigurationError("--until cannot be combined with --follow")
        until_ms = parse_time(until) if until else None
        wanted = wanted._replace(until_ms=until_ms, tail=tail, queue_ids=queue, key=key)
        trio.run(_Reader(wanted, printer).run, nameserver)
        return
    if queue or until or tail or key or isinstance(wanted.start, int):
        raise ConfigurationError(
            "--queue, --until, --tail, --key and an offset cannot be combined with --group, whose "
            "members share the queues and their progress; to move the group, see `headrace group "
            "reset`"
        )
    if pops:
        trio.run(_Taker(group, wanted, printer).run, nameserver)
    else:
        trio.run(_Member(group, wanted, printer).run, nameserver)


def last_messages(
    topic: str,
    count: int,
    nameserver: str | None,
    patience: options.Patience,
    *,
    allow_partial: bool,
) -> list[ReceivedMessage]:
    """The last messages of a topic, by store time. Raises PartialRead."""
    import trio

    from headrace.consumer.subscription import Choice

    found: list[ReceivedMessage] = []
    wanted = _Wanted(
        topic, "earliest", Choice(), patience, follow=False, allow_partial=allow_partial, tail=count
    )
    trio.run(_Reader(wanted, _Printer(None, found.append)).run, nameserver)
    return found


def _choice(topic: str, tags: Sequence[str], sql: str | None) -> Choice:
    """Messages with any of ``tags``, or that pass a filter; all if there are neither.

    Raises ConfigurationError.
    """
    from headrace.consumer.subscription import ALL, Choice, Subscription

    listed = " || ".join(tag for text in tags for tag in text.split(",")) or ALL
    choice = Choice(listed, sql)
    Subscription(topic, *choice)
    return choice


def _print_function(template: str | None, *, as_json: bool) -> Callable[[ReceivedMessage], None]:
    from headrace.admin.messages import Format, print_message

    if template is None:
        return partial(print_message, as_json=as_json)
    if as_json:
        raise ConfigurationError("--format cannot be combined with --json")
    return Format(template).print


class _Printer:
    """Prints messages up to a maximum count."""

    def __init__(
        self, count_max: int | None, print_message: Callable[[ReceivedMessage], None]
    ) -> None:
        self._left = count_max
        self._print = print_message

    @property
    def is_done(self) -> bool:
        return self._left == 0

    @property
    def left(self) -> int | None:
        """How many more to print; None without a maximum."""
        return self._left

    def print(self, message: ReceivedMessage) -> None:
        self._print(message)
        if self._left is not None:
            self._left -= 1


class _Wanted(NamedTuple):
    """The messages to read; see the options of the same names. The last four: without a group."""

    topic: str
    start: Point
    choice: Choice
    patience: options.Patience
    follow: bool
    allow_partial: bool
    until_ms: int | None = None
    tail: int | None = None
    queue_ids: Sequence[int] = ()
    key: str | None = None


class _Reader:
    """Reads queues without a group, so nothing is committed."""

    def __init__(
        self, wanted: _Wanted, printer: _Printer, starts: Mapping[MessageQueue, int] | None = None
    ) -> None:
        """starts: the first offset of each queue, instead of ``start``; no other queue is read."""
        self._wanted = wanted
        self._printer = printer
        self._starts = starts
        # Messages up to the ends, of which the last are printed; None if all are printed at once.
        self._tail: list[ReceivedMessage] | None = [] if wanted.tail else None

    async def run(self, nameserver: str | None) -> None:
        """Print until the maximum count or the end of the queues is reached. Raises PartialRead."""
        from headrace.admin.interrupts import deferred_interrupts
        from headrace.consumer.pull import PullConsumer

        first = self._wanted.start
        start = "earliest" if isinstance(first, int) else first
        with deferred_interrupts() as interrupts:
            async with (
                PullConsumer(nameserver=nameserver, start=start) as consumer,
                interrupts.cancel_block(),
            ):
                await self._read(consumer)

    async def _read(self, consumer: PullConsumer) -> None:
        wanted = self._wanted
        goal = Goal(
            wanted.topic,
            list(self._starts or self._choose(await self._queues(consumer))),
            partial(self._end_of, consumer),
            wanted.patience,
            allow_partial=wanted.allow_partial,
        )
        start_of = partial(self._start_of, consumer)
        reader = EndReader(consumer, goal, wanted.choice, start_of, skips_parts=True)
        while not self._printer.is_done:
            if received := await reader.receive():
                self._take(*received)
            if reader.is_over:
                self._print_tail()
                if not wanted.follow:
                    reader.check()
                    break

    async def _queues(self, consumer: PullConsumer) -> list[MessageQueue]:
        wanted = self._wanted
        await wait_for_topic(consumer, wanted.topic, wanted.patience, for_ever=wanted.follow)
        if wanted.follow and not wanted.allow_partial:
            require_whole(
                wanted.topic, await consumer.missing(wanted.topic), allow_partial=True, warn=warn
            )
        return await all_queues(consumer, wanted.topic, allow_partial=wanted.allow_partial)

    async def _start_of(self, consumer: PullConsumer, queue: MessageQueue, end: int) -> int | None:
        """The offset to start at in a queue; None for the consumer's own position."""
        wanted = self._wanted
        if self._starts:
            return self._starts[queue]
        if wanted.tail:
            return max(await consumer.min_offset(queue), end - wanted.tail)
        return wanted.start if isinstance(wanted.start, int) else None

    def _choose(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        wanted = self._wanted
        absent = set(wanted.queue_ids) - {queue.queue_id for queue in queues}
        if absent:
            raise ConfigurationError(
                f"topic {wanted.topic} has no queue {min(absent)}; see `headrace topic describe`"
            )
        ids = wanted.queue_ids or {queue.queue_id for queue in queues}
        return [queue for queue in queues if queue.queue_id in ids]

    async def _end_of(self, consumer: PullConsumer, queue: MessageQueue) -> int:
        """The offset to stop at in a queue."""
        end = await consumer.max_offset(queue)
        if self._wanted.until_ms is None:
            return end
        return min(end, await consumer.offset_at(queue, self._wanted.until_ms + 1))

    def _take(self, batch: MessageBatch, end: int) -> None:
        for message in batch:
            if not (self._wanted.follow or message.queue_offset < end):
                break
            if self._tail is not None:
                self._tail.append(message)
            else:
                self._print(message)
        sys.stdout.flush()

    def _print_tail(self) -> None:
        if self._tail is None:
            return
        count = self._wanted.tail or 0
        messages = sorted(self._tail, key=lambda message: message.store_timestamp_ms)[-count:]
        self._tail = None
        for message in messages:
            self._print(message)
        sys.stdout.flush()

    def _print(self, message: ReceivedMessage) -> None:
        key = self._wanted.key
        if not self._printer.is_done and (key is None or _has_key(message, key)):
            self._printer.print(message)


def _has_key(message: ReceivedMessage, key: str) -> bool:
    from headrace_protocol.compression import UNREADABLE

    try:
        return message.key == key or key in message.key.split(" ")
    except UNREADABLE:
        return False


class _Taker:
    """Takes messages out for a group, and acknowledges what it has printed."""

    def __init__(self, group: str, wanted: _Wanted, printer: _Printer) -> None:
        if wanted.start not in ("earliest", "latest"):
            raise ConfigurationError("--from must be earliest or latest with --pop")
        self._group = group
        self._wanted = wanted
        self._printer = printer

    async def run(self, nameserver: str | None) -> None:
        """Print until the maximum count, or until nothing comes any more."""
        from headrace.admin.interrupts import deferred_interrupts
        from headrace.consumer.simple import SimpleConsumer

        tags, sql = self._wanted.choice
        start: Literal["earliest", "latest"] = (
            "latest" if self._wanted.start == "latest" else "earliest"
        )
        with deferred_interrupts() as interrupts:
            async with (
                SimpleConsumer(
                    self._group,
                    {self._wanted.topic: tags},
                    filter=sql,
                    nameserver=nameserver,
                    start=start,
                ) as consumer,
                interrupts.cancel_block(),
            ):
                await self.take(consumer)

    async def take(self, consumer: SimpleConsumer) -> None:
        """Print and acknowledge. Raises the error of a topic that stays away for too long."""
        import trio

        give_up_at = trio.current_time() + self._wanted.patience.give_up_s
        while not self._printer.is_done:
            count = min(POP_MESSAGES_MAX, self._printer.left or POP_MESSAGES_MAX)
            try:
                messages = await consumer.receive(max=count, wait=_QUIET_S)
            except HeadraceError as error:
                may_retry = self._wanted.follow or trio.current_time() < give_up_at
                if error.retryable and may_retry:
                    continue
                raise
            if not (messages or self._wanted.follow):
                return
            for message in messages:
                self._printer.print(message)
            sys.stdout.flush()
            # What is printed is not delivered again, even if a signal arrives now.
            with trio.move_on_after(_ACK_S, shield=True):
                await consumer.ack(messages)


class _Member:
    """Reads as a member of a group."""

    def __init__(self, group: str, wanted: _Wanted, printer: _Printer) -> None:
        self._group = group
        self._wanted = wanted
        self._printer = printer
        self._goal: Goal | None = None
        # The progress at the end in queues that were unreadable.
        self._unread: dict[MessageQueue, int] = {}

    async def run(self, nameserver: str | None) -> None:
        """Print until the maximum count, or until all messages that existed at first are read.

        Raises PartialRead.
        """
        from headrace.admin.interrupts import deferred_interrupts
        from headrace.consumer.pull import PullConsumer

        # From here on, a signal cannot prevent the commit of messages already printed.
        with deferred_interrupts() as interrupts:
            async with PullConsumer(self._group, nameserver=nameserver) as offsets:
                async with interrupts.cancel_block():
                    wanted = self._wanted
                    await wait_for_topic(
                        offsets, wanted.topic, wanted.patience, for_ever=wanted.follow
                    )
                if not interrupts.has_arrived:
                    await self._read(offsets, nameserver, interrupts)
        await self._end(nameserver)

    async def _read(
        self, offsets: PullConsumer, nameserver: str | None, interrupts: Interrupts
    ) -> None:
        from headrace.consumer.push import Consumer

        start = self._wanted.start
        tags, sql = self._wanted.choice
        topics = {self._wanted.topic: tags}
        async with (
            Consumer(
                self._group, topics, filter=sql, nameserver=nameserver, start=start
            ) as consumer,
            interrupts.cancel_block() as nursery,
        ):
            if not self._wanted.follow:
                nursery.start_soon(self._stop_at_end, consumer, offsets, nursery.cancel_scope)
            async for message in consumer:
                self._printer.print(message)
                sys.stdout.flush()
                if self._printer.is_done:
                    break

    async def _stop_at_end(
        self, consumer: Consumer, offsets: PullConsumer, scope: trio.CancelScope
    ) -> None:
        import trio

        topic, allow_partial = self._wanted.topic, self._wanted.allow_partial
        queues = await all_queues(offsets, topic, allow_partial=allow_partial)
        end_of, patience = offsets.max_offset, self._wanted.patience
        goal = self._goal = Goal(topic, queues, end_of, patience, allow_partial=allow_partial)
        while True:
            await goal.look()
            at = await self._committed(consumer, offsets, goal.ends)
            if goal.is_over(at, consumer.failures(goal.give_up_ms)):
                self._unread = goal.unread(at)
                scope.cancel()
            await trio.sleep(_CHECK_S)

    async def _end(self, nameserver: str | None) -> None:
        """Print what can be read of the queues that the group could not read. Raises PartialRead.

        The group commits none of it: there may be unread messages before it.
        """
        goal = self._goal
        if goal is None or self._printer.is_done:
            return
        if self._unread:
            wanted = self._wanted._replace(start="earliest", allow_partial=False)
            try:
                await _Reader(wanted, self._printer, self._unread).run(nameserver)
                goal.check({}, {})
            except* PartialRead:  # what it could not read is printed
                pass
            if self._wanted.allow_partial:
                return
            rest = ", ".join(f"{queue.queue_id} from {at}" for queue, at in self._unread.items())
            raise PartialRead(
                f"group {self._group} could not read queues of topic {self._wanted.topic} to the "
                f"end ({rest}), and gets these messages again: repeat the command when the "
                "brokers are back"
            )
        goal.check({}, {})

    @staticmethod
    async def _committed(
        consumer: Consumer, offsets: PullConsumer, ends: Container[MessageQueue]
    ) -> dict[MessageQueue, int]:
        """The progress in the queues of this member's share."""
        from headrace.tasks import gather

        with suppress(HeadraceError):  # the broker of a queue that fails
            await consumer.commit()
        share = [queue for queue in {*consumer.assignment, *consumer.failures()} if queue in ends]
        outcomes = await gather(offsets.committed, share)
        return {
            queue: 0 if isinstance(at, HeadraceError) else at or 0
            for queue, at in zip(share, outcomes, strict=True)
        }
