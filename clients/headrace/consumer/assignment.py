"""The queues assigned to this member of a group, and the handover when they change."""

from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

from headrace.config import check_callback
from headrace.consumer.fetcher import Fetcher
from headrace.consumer.locks import QueueLockClient
from headrace.consumer.process_queue import Failure, Limits, ProcessQueue, long_failures
from headrace.consumer.rebalance import allocate
from headrace.consumer.start import Start, start_offset
from headrace.errors import (
    AccessDenied,
    BrokerError,
    HeadraceError,
    NoQueue,
    RouteNotFound,
    StrategyFailed,
)
from headrace.outages import broker, is_absence
from headrace.pacing import Pacer
from headrace.tasks import gather, wait_if_async
from headrace_protocol.bodies import GetConsumerListByGroupResponseBody
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import ConsumerGroupHeader
from headrace_protocol.system_topics import RETRY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from anyio.abc import TaskGroup

    from headrace.consumer.inbox import Inbox
    from headrace.consumer.offset_store import OffsetStore
    from headrace.consumer.rates import Rates
    from headrace.consumer.strategies import Strategy
    from headrace.consumer.subscription import Subscription
    from headrace.instance import ClientInstance
    from headrace.received import BodyLimits
    from headrace.route import TopicRoute
    from headrace_protocol.bodies import MessageQueue

    # A function of a queue; may be async.
    OnQueue = Callable[[MessageQueue], object]
    CommitOffsets = Callable[[str, Mapping[MessageQueue, int]], Awaitable[None]]

_log = logging.getLogger("headrace.consumer")

REBALANCE_INTERVAL_S = 20.0
COMMIT_INTERVAL_S = 5.0
LOCK_INTERVAL_S = 10.0
# Brokers give a queue away 60 s after the last request for its lock, or 35 s if the connection is
# closed.
LOCK_TRUST_S = 30.0
_RETRY_PAUSE_S = 1.0
# Some groups never get a retry topic.
_SEEK_S = 30.0
_SEEK_PAUSE_S = 0.01
_HANDOVER_S = 20.0


class Membership(NamedTuple):
    """Settings with which a member of a group reads.

    broadcast: the member reads all queues, and returns no messages.
    """

    group: str
    start: Start
    ordered: bool
    broadcast: bool
    strategy: Strategy
    limits: Limits
    body_limits: BodyLimits
    on_assigned: OnQueue | None
    on_revoked: OnQueue | None


class Assignment:
    """A member's share of its group's queues; takes over, commits and releases queues.

    offsets: keeps the progress.
    process_queues: the queues assigned to this member now. rates: of what it pulls and processes.
    group_changed: event that triggers an immediate rebalance when set.
    """

    def __init__(
        self,
        instance: ClientInstance,
        member: Membership,
        subscriptions: list[Subscription],
        inbox: Inbox,
        offsets: OffsetStore,
        rates: Rates,
    ) -> None:
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.group_changed = anyio.Event()
        self._instance = instance
        self._outages = instance.outages
        self._outages.on_denied = inbox.fail
        self._member = member
        self._group = member.group
        self._retry_topic = f"{RETRY_PREFIX}{member.group}"
        self._subscriptions = subscriptions
        self._inbox = inbox
        self._offsets = offsets
        self.rates = rates
        self._locks = QueueLockClient(instance, member.group)
        self._fetcher = Fetcher(instance, member.group, inbox, member.body_limits)
        # Released queues whose last messages are still being processed, under the lock.
        self._leaving: set[MessageQueue] = set()
        # Queues that a renewal locked again although they were released meanwhile.
        self._strays: set[MessageQueue] = set()
        self._seeks_retry_topic = False
        check_callback("on_assigned", member.on_assigned)
        check_callback("on_revoked", member.on_revoked)
        # Queues of this member's share that it could not take over.
        self._untaken: dict[MessageQueue, Failure] = {}
        self._tasks: TaskGroup | None = None

    async def start(self, tasks: TaskGroup) -> None:
        """Take this member's first share, then keep it up to date in ``tasks``."""
        self._tasks = tasks
        # A rebalance that was cancelled by the end of an earlier block leaves something behind.
        for left_behind in (self.process_queues, self._leaving, self._strays, self._untaken):
            left_behind.clear()
        self._seeks_retry_topic = False
        complete = await self._rebalance()
        self.expect_retries()
        tasks.start_soon(self._rebalance_regularly, complete)
        tasks.start_soon(self._commit_regularly)
        if self._member.ordered:
            tasks.start_soon(self._renew_locks_regularly)

    def read_queues(self) -> list[ProcessQueue]:
        """The queues that this member reads."""
        return [*self.process_queues.values()]

    async def commit(self) -> None:
        """Commit all processed messages, and wait until the brokers confirm."""
        await self._commit_confirmed(self.process_queues.values())

    async def release_all(self) -> None:
        """Stop fetching, commit, and release all queues to the other members."""
        released = list(self.process_queues.values())
        self.process_queues.clear()
        try:
            await self._release(released)
        except HeadraceError as error:
            _log.warning("group %s: the last messages will be redelivered: %s", self._group, error)

    def failures(self, after_ms: float) -> dict[MessageQueue, HeadraceError]:
        """See ``Consumer.failures``."""
        pulled = {queue: pulled.failure for queue, pulled in self.process_queues.items()}
        return long_failures(self._untaken | pulled, after_ms)

    def expect_retries(self) -> None:
        """Look at once for queues of the retry topic that are not known yet."""
        assert self._tasks is not None
        if self._member.broadcast or self._seeks_retry_topic:
            return
        if self._brokers_without_retries():
            self._seeks_retry_topic = True
            self._tasks.start_soon(self._seek_retry_topic)

    # -- rebalancing -------------------------------------------------------------------------------

    async def _rebalance_regularly(self, complete: bool) -> None:
        pacer = Pacer()
        while True:
            pacer.begin()
            with anyio.move_on_after(REBALANCE_INTERVAL_S if complete else _RETRY_PAUSE_S):
                await self.group_changed.wait()
            self.group_changed = anyio.Event()
            before = set(self.process_queues)
            try:
                complete = await self._rebalance()
            except HeadraceError as error:
                self._report_stale(error)
                complete = False
            # A broker may announce group changes endlessly.
            await anyio.sleep(pacer.delay_s(progress=before != self.process_queues.keys()))

    def _report_stale(self, error: HeadraceError) -> None:
        """Log a failed rebalance, unless ``_report_failures`` has."""
        if isinstance(error, StrategyFailed):
            self._outages.failed(f"the strategy of group {self._group}", error)
        elif isinstance(error, AccessDenied):
            self._outages.denied(error)
        elif not isinstance(error, BrokerError):
            topic = error.topic if isinstance(error, RouteNotFound | NoQueue) else ""
            self._outages.report(error, topic)

    async def _rebalance(self) -> bool:
        """Bring the assignment up to date; return False if it is incomplete."""
        complete = True
        asked: set[str] = set()
        failed: set[str] = set()
        await self._drop_lost_queues()
        await self._unlock_strays()
        for subscription in self._subscriptions:
            try:
                route = await self._instance.route(subscription.topic)
            except RouteNotFound:
                if not _is_retry(subscription.topic):
                    raise
            else:
                complete &= await self._share_topic(subscription, route, failed)
                self._outages.worked(f"topic {subscription.topic}")
                asked.update(route.brokers)
        # The pulls of a queue notice when its broker is back.
        pulled = {self._instance.broker_of(queue) for queue in self.process_queues}
        for name in asked - failed:
            self._outages.worked(self._at(name))
            if name not in pulled:
                self._outages.worked(broker(name))
        return complete

    def _at(self, broker_name: str) -> str:
        """The outage of this group on a broker."""
        return f"group {self._group} on {broker(broker_name)}"

    async def _seek_retry_topic(self) -> None:
        """Brokers create it at the group's first heartbeat, and register it soon after."""
        pause_s = _SEEK_PAUSE_S
        with anyio.move_on_after(_SEEK_S):
            while self._brokers_without_retries():
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_PAUSE_S)
                self._instance.invalidate_route(self._retry_topic)
                with suppress(HeadraceError):
                    await self._instance.route(self._retry_topic)
            self.group_changed.set()
        self._seeks_retry_topic = False

    def _brokers_without_retries(self) -> set[str]:
        """Brokers of the group's topics that the route of its retry topic lacks."""
        brokers: dict[str, set[str]] = {}
        for subscription in self._subscriptions:
            route = self._instance.known_route(subscription.topic)
            brokers[subscription.topic] = set(route.brokers) if route else set()
        with_retries = brokers.pop(self._retry_topic)
        return set().union(*brokers.values()) - with_retries

    async def _share_topic(
        self, subscription: Subscription, route: TopicRoute, failed: set[str]
    ) -> bool:
        """Take this member's share of a topic; return False if it is incomplete.

        failed: receives the names of the brokers that fail.
        """
        # By broker name, the error that makes the broker's queues unavailable for now.
        failures = await self._join(route)
        try:
            mine = await self._share_queues(subscription, route, failures)
        finally:
            failed.update(failures)
            self._report_failures(failures)
        self._note_untaken(subscription.topic, mine, failures)
        self._check_share(mine, failures)
        return not failures and mine <= self.process_queues.keys()

    def _note_untaken(
        self, topic: str, mine: set[MessageQueue], failures: Mapping[str, HeadraceError]
    ) -> None:
        """Note which queues of this member's share of a topic failed, and since when."""
        before, now = self._untaken, anyio.current_time()
        self._untaken = {queue: each for queue, each in before.items() if queue.topic != topic}
        for queue in mine - self.process_queues.keys() - self._leaving:
            known = before.get(queue)
            error = failures.get(self._instance.broker_of(queue)) or (known and known.error)
            if error:
                self._untaken[queue] = Failure(known.since if known else now, error)

    async def _share_queues(
        self, subscription: Subscription, route: TopicRoute, failures: dict[str, HeadraceError]
    ) -> set[MessageQueue]:
        """Release and take over queues of a topic; return this member's share."""
        mine = set(route.read_queues)
        if not self._member.broadcast:
            members = await self._members(route, failures)
            mine = allocate(self._member.strategy, mine, members, self._instance.client_id)
            self._outages.worked(f"the strategy of group {self._group}")
        held = {queue for queue in self.process_queues if queue.topic == subscription.topic}
        await self._hand_over(sorted(held - mine))
        asked = self._served(mine - self._leaving, failures)
        locked_at = anyio.current_time()
        locked = await self._lock(sorted(asked), failures) if self._member.ordered else asked
        # A consumer that closes meanwhile has released its queues.
        for queue in self._served(held & asked - locked, failures) & self.process_queues.keys():
            # Another member already holds the queue, so there is nothing to commit.
            await self._lose(queue)
        for queue in sorted(locked - held):
            if self._served({queue}, failures):
                await self._try_to_take_over(queue, subscription, failures, locked_at)
        return mine

    def _served(
        self, queues: set[MessageQueue], failures: Mapping[str, HeadraceError]
    ) -> set[MessageQueue]:
        """The queues whose brokers are not in ``failures``."""
        return {queue for queue in queues if self._instance.broker_of(queue) not in failures}

    def _report_failures(self, failures: Mapping[str, HeadraceError]) -> None:
        for name, error in failures.items():
            self._outages.failed(broker(name) if is_absence(error) else self._at(name), error)

    def _check_share(self, mine: set[MessageQueue], failures: Mapping[str, HeadraceError]) -> None:
        """Raise if failures leave this member no queue of a topic."""
        has_none = self.process_queues.keys().isdisjoint(mine)
        if mine and has_none and not self._served(mine, failures):
            raise failures[self._instance.broker_of(min(mine))]

    async def _join(self, route: TopicRoute) -> dict[str, HeadraceError]:
        """Send a first heartbeat to all brokers of a topic; return errors by broker name."""
        replicas_at = [
            (name, at) for name, replicas in route.brokers.items() for at in replicas.values()
        ]

        async def join(replica: tuple[str, str]) -> None:
            if not self._instance.open_connection(replica[1]):
                await self._instance.heartbeat([replica[1]])

        outcomes = await gather(join, replicas_at)
        # A failed replica does not make the queues unavailable.
        return {
            name: error
            for (name, address), error in zip(replicas_at, outcomes, strict=True)
            if error is not None and address == route.address(name)
        }

    async def _members(self, route: TopicRoute, failures: dict[str, HeadraceError]) -> list[str]:
        """The group's client ids, including this one, from the first broker that answers.

        Raises the first failure if none answers; NoQueue if the topic has no broker.
        """
        addresses = {name: at for name in route.brokers if (at := route.address(name))}
        if not addresses:
            raise NoQueue(route.topic, "read from")
        for name in [name for name in addresses if name not in failures]:
            try:
                return await self._members_at(addresses[name])
            except HeadraceError as error:
                failures[name] = error
        raise next(iter(failures.values()))

    async def _members_at(self, address: str) -> list[str]:
        """A broker's list, after a heartbeat if it has forgotten this member."""
        members = await self._listed_at(address)
        if self._instance.client_id in members:
            return members
        await self._instance.heartbeat([address])
        return await self._listed_at(address)

    async def _listed_at(self, address: str) -> list[str]:
        header = ConsumerGroupHeader(consumer_group=self._group)
        response = await self._instance.request(
            address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, header
        )
        if response.command.code == ResponseCode.SYSTEM_ERROR:
            return []  # RocketMQ's answer for a group without members
        return response.expect().decode(GetConsumerListByGroupResponseBody).consumer_id_list

    async def _try_to_take_over(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        failures: dict[str, HeadraceError],
        locked_at: float,
    ) -> None:
        """Take over a queue; record an error of its broker in ``failures``."""
        broker_name = self._instance.broker_of(queue)
        try:
            await self._take_over(queue, subscription, locked_at)
        except HeadraceError as error:
            if is_absence(error) or broker_name == queue.broker_name:
                failures[broker_name] = error
                return
            # The leader of a static topic's queue may lack another broker, for this queue only.
            self._outages.report(error, queue.topic, broker_name, queue)
            self._untaken.setdefault(queue, Failure(anyio.current_time(), error))

    async def _take_over(
        self, queue: MessageQueue, subscription: Subscription, locked_at: float
    ) -> None:
        committed = await self._offsets.committed(self._group, queue)
        offset = committed
        if offset is None:
            start = "earliest" if _is_retry(queue.topic) else self._member.start
            offset = await start_offset(start, queue, self._offsets)
        process_queue = ProcessQueue(queue, self._member.limits, offset, committed)
        process_queue.rates = self.rates
        if self._member.broadcast:
            await self._fetcher.check(process_queue, subscription)
        if self._member.ordered:
            process_queue.locked_until = locked_at + LOCK_TRUST_S
        self.process_queues[queue] = process_queue
        await self._tell(self._member.on_assigned, "on_assigned", queue)
        assert self._tasks is not None
        self._tasks.start_soon(self._fetcher.run, process_queue, subscription)

    async def _hand_over(self, queues: Iterable[MessageQueue]) -> None:
        released = [self.process_queues.pop(queue) for queue in queues]
        if not self._member.ordered:
            await self._try_to_release(released)
            return
        assert self._tasks is not None
        for process_queue in released:
            process_queue.drop()
            self._leaving.add(process_queue.queue)
            self._tasks.start_soon(self._hand_over_ordered, process_queue)

    async def _hand_over_ordered(self, process_queue: ProcessQueue) -> None:
        """Keep the lock until the messages handed out are processed."""
        with anyio.move_on_after(_HANDOVER_S):
            await self._inbox.wait_until_idle(process_queue)
        try:
            await self._try_to_release([process_queue])
        finally:
            self._leaving.discard(process_queue.queue)

    async def _try_to_release(self, process_queues: list[ProcessQueue]) -> None:
        try:
            await self._release(process_queues)
        except HeadraceError as error:
            if not is_absence(error):
                _log.warning("group %s: messages will be redelivered: %s", self._group, error)

    async def _release(self, process_queues: list[ProcessQueue]) -> None:
        for process_queue in process_queues:
            process_queue.drop()
        for process_queue in process_queues:
            await self._tell(self._member.on_revoked, "on_revoked", process_queue.queue)
        try:
            await self._commit_confirmed(process_queues)
        finally:
            if self._member.ordered:
                await self._locks.unlock([process_queue.queue for process_queue in process_queues])

    # -- locks -------------------------------------------------------------------------------------

    async def _lock(
        self, queues: list[MessageQueue], failures: dict[str, HeadraceError]
    ) -> set[MessageQueue]:
        """Take or renew locks; see ``QueueLockClient.lock``."""
        asked_at = anyio.current_time()
        locked = await self._locks.lock(queues, failures)
        for queue in locked & self.process_queues.keys():
            process_queue = self.process_queues[queue]
            # Another member may have processed the queue since a lock that has ended.
            if process_queue.locked_until is not None and not process_queue.has_lost_lock:
                process_queue.locked_until = max(
                    process_queue.locked_until, asked_at + LOCK_TRUST_S
                )
        return locked

    async def _renew_locks_regularly(self) -> None:
        while True:
            await anyio.sleep(LOCK_INTERVAL_S)
            await self._renew_locks()

    async def _renew_locks(self) -> None:
        failures: dict[str, HeadraceError] = {}
        asked = sorted(self.process_queues)
        locked = await self._lock(asked, failures)
        self._strays |= locked - self.process_queues.keys()
        refused = self._served(set(asked), failures) - locked
        if self._strays or refused & self.process_queues.keys():
            self.group_changed.set()

    async def _unlock_strays(self) -> None:
        """Not done by the renewal: meanwhile, a rebalance may be taking the queues over again."""
        strays, self._strays = self._strays - self.process_queues.keys() - self._leaving, set()
        try:
            await self._locks.unlock(strays)
        except HeadraceError as error:
            _log.warning("group %s: some queues stay locked for a minute: %s", self._group, error)

    async def _lose(self, queue: MessageQueue) -> None:
        """Give up a queue that another member may have."""
        if process_queue := self.process_queues.pop(queue, None):
            process_queue.drop()
            await self._tell(self._member.on_revoked, "on_revoked", queue)

    async def _tell(self, callback: OnQueue | None, name: str, queue: MessageQueue) -> None:
        """Call the user's callback; its error is logged, for the group continues."""
        if callback is None or _is_retry(queue.topic):
            return
        try:
            await wait_if_async(callback(queue))
        except Exception:  # noqa: BLE001 - whatever the user's function raises
            _log.exception("group %s: %s failed for %s", self._group, name, queue)

    async def _drop_lost_queues(self) -> None:
        lost = [queue for queue, held in self.process_queues.items() if held.has_lost_lock]
        for queue in lost:
            await self._lose(queue)
        away = self._outages.names
        if count := sum(broker(self._instance.broker_of(queue)) not in away for queue in lost):
            _log.warning(
                "group %s: locks of %d queues not renewed in time, messages may be redelivered",
                self._group,
                count,
            )

    # -- progress ----------------------------------------------------------------------------------

    async def _commit_regularly(self) -> None:
        while True:
            await anyio.sleep(COMMIT_INTERVAL_S)
            for process_queue in self.process_queues.values():
                process_queue.count_progress()
            self._report_failures(
                await self._commit(self.process_queues.values(), self._offsets.commit_oneway)
            )

    async def _commit_confirmed(self, process_queues: Iterable[ProcessQueue]) -> None:
        """Commit, and wait until the brokers confirm. Raises the error of the first that fails."""
        for error in (await self._commit(process_queues, self._offsets.commit)).values():
            raise error

    async def _commit(
        self, process_queues: Iterable[ProcessQueue], send: CommitOffsets
    ) -> dict[str, HeadraceError]:
        """Commit at all brokers at the same time; return the errors by broker name."""
        by_broker: defaultdict[str, dict[MessageQueue, int]] = defaultdict(dict)
        for queue, offset in _progress(process_queues).items():
            by_broker[self._instance.broker_of(queue)][queue] = offset

        async def commit(offsets: dict[MessageQueue, int]) -> None:
            await send(self._group, offsets)
            self._note_committed(offsets)

        outcomes = await gather(commit, list(by_broker.values()))
        return {
            name: error
            for name, error in zip(by_broker, outcomes, strict=True)
            if error is not None
        }

    def _note_committed(self, offsets: dict[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self.process_queues:
                self.process_queues[queue].committed_offset = offset


def _progress(process_queues: Iterable[ProcessQueue]) -> dict[MessageQueue, int]:
    """Offsets that are processed but not committed, except of queues that others may process."""
    return {
        process_queue.queue: process_queue.processed_offset
        for process_queue in process_queues
        if process_queue.processed_offset != process_queue.committed_offset
        and not process_queue.has_lost_lock
    }


def _is_retry(topic: str) -> bool:
    return topic.startswith(RETRY_PREFIX)
