"""Held POPs at all brokers of a group's topics, and the messages that they bring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import anyio.lowlevel

from headrace.consumer.pops import Pop
from headrace.consumer.process_queue import Failure
from headrace.errors import ClientClosed, ConfigurationError, HeadraceError
from headrace.pacing import Pacer, pause_after
from headrace_protocol.bodies import MessageQueue
from headrace_protocol.pop.headers import ANY_QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from anyio.abc import TaskGroup

    from headrace.consumer.leases import MemberLeases
    from headrace.consumer.pops import PopMember, Popped
    from headrace.consumer.rates import Rates
    from headrace.consumer.shares import Shares
    from headrace.consumer.subscription import Subscription
    from headrace.instance import ClientInstance
    from headrace.popped import Leases, PoppedMessage

# Grace for the answers to the last POPs, once the wait of a call is over.
_GRACE_S = 1.0
_PAUSE_S = 1.0
# The share of their time after which messages that nobody has asked for are given back.
KEPT_SHARE: Final = 0.5


class _Place(NamedTuple):
    """Queues of a topic at a broker, where one POP at a time is under way.

    No broker: the topic's route. queue_id: ANY_QUEUE for all queues of the broker.
    """

    subscription: Subscription
    broker_name: str
    queue_id: int = ANY_QUEUE


class _Kept(NamedTuple):
    """A message that waits for its receiver. until: when to give it back."""

    message: PoppedMessage
    until: float


class Receive:
    """One call for messages.

    until: when its wait is over. places: where it looks. pending: those of them that have not
    answered since it began. failures: the last error of each place that can't be asked.
    """

    def __init__(self, count: int, until: float, invisible_ms: int) -> None:
        self.count = count
        self.until = until
        self.invisible_ms = invisible_ms
        self.places: set[_Place] = set()
        self.pending: set[_Place] = set()
        self.failures: dict[_Place, HeadraceError] = {}

    def look_at(self, subscription: Subscription, places: set[_Place]) -> None:
        """Look for messages of a subscription there, and nowhere else."""
        gone = {place for place in self.places if place.subscription == subscription} - places
        self.places = self.places - gone | places
        self.pending -= gone
        for place in gone:
            self.failures.pop(place, None)

    def time_left(self, now: float) -> float:
        """Seconds for which it waits at most, also for the last answers; 0 when it is over."""
        return max(0.0, self.until - now + (_GRACE_S if self.pending else 0))

    def note(self, place: _Place, error: HeadraceError | None) -> None:
        """A place has answered, or failed."""
        self.pending.discard(place)
        if error is None:
            self.failures.pop(place, None)
        elif place in self.places:
            self.failures[place] = error

    def hopeless(self) -> HeadraceError | None:
        """An error that waiting doesn't mend."""
        return next((error for error in self.failures.values() if not error.retryable), None)

    def all_failed(self) -> HeadraceError | None:
        """An error if there is no place that could be asked."""
        if self.places == self.failures.keys():
            return next(iter(self.failures.values()), None)
        return None


class Polls:
    """Takes messages out for the calls that wait, as long as any do.

    Errors that a retry may mend are logged while it retries; the others are for the caller.

    leases: gives back messages, and acknowledges those that only look like wanted ones.
    given: what messages settle themselves with. shares: the queues to pop; None pops all.
    rates: counts what is popped, if anybody asks for it.
    """

    def __init__(
        self,
        instance: ClientInstance,
        member: PopMember,
        subscriptions: Sequence[Subscription],
        leases: MemberLeases,
    ) -> None:
        self.given: Leases = leases
        self.shares: Shares | None = None
        self.rates: Rates | None = None
        self._instance = instance
        self._member = member
        self._subscriptions = subscriptions
        self._leases = leases
        self._tasks: TaskGroup | None = None
        self._is_open = False
        # By subscription, where this member pops now, as far as it is known.
        self._places: dict[Subscription, set[_Place]] = {}
        self._polled: set[_Place] = set()
        self._kept: list[_Kept] = []
        self._calls: list[Receive] = []
        self._changed = anyio.Event()
        self._failures: dict[_Place, Failure] = {}

    def open(self, tasks: TaskGroup) -> None:
        """Begin to poll, in tasks of the client."""
        self._tasks = tasks
        self._is_open = True
        self._places.clear()
        self._polled.clear()
        self._failures.clear()

    async def close(self) -> None:
        """Leave the group, and give back what nobody has received."""
        self._is_open = False
        self.look_again()
        await self._give_back_kept()
        await self._instance.leave()
        # The last POPs are answered before; their tasks note what they have brought.
        await anyio.lowlevel.checkpoint()
        await self._give_back_kept()

    async def _give_back_kept(self) -> None:
        kept, self._kept = self._kept, []
        await self._leases.give_back([each.message for each in kept])

    @property
    def failures(self) -> dict[MessageQueue, Failure]:
        """Topics at brokers that can't be asked now; each has all its queues in one."""
        return {
            MessageQueue(place.subscription.topic, place.broker_name, place.queue_id): failure
            for place, failure in self._failures.items()
        }

    async def check_topics(self) -> None:
        """Raise the error of a topic that has no route, or can't be taken out."""
        for subscription in self._subscriptions:
            await self._brokers(subscription.topic)

    async def receive(self, call: Receive) -> list[PoppedMessage]:
        """Messages for a call; none if none came in time. Raises as SimpleConsumer.receive."""
        self._calls.append(call)
        try:
            return await self._found(call)
        finally:
            self._calls.remove(call)

    async def _found(self, call: Receive) -> list[PoppedMessage]:
        is_first = True
        while not (messages := self._take(call.count)):
            # What changes while the places are looked up counts, too.
            changed = self._changed
            if is_first or call.until > anyio.current_time():
                await self._ask_all(call)
            if error := call.hopeless():
                raise error
            left_s = call.time_left(anyio.current_time())
            if not left_s:
                if error := call.all_failed():
                    raise error
                return []
            is_first = False
            # A topic without a route has no task that would try again.
            with anyio.move_on_after(min(left_s, _PAUSE_S) if call.failures else left_s):
                await changed.wait()
            if not self._is_open:
                raise ClientClosed(self._leases.client)
        return messages

    def _take(self, count: int) -> list[PoppedMessage]:
        now = anyio.current_time()
        late = [each.message for each in self._kept if each.until <= now]
        kept = [each for each in self._kept if each.until > now]
        self._kept = kept[count:]
        if late:
            self._begin(self._leases.give_back, late)
        return [each.message for each in kept[:count]]

    def _begin(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
        assert self._tasks is not None
        self._tasks.start_soon(work, *args)

    def look_again(self) -> None:
        """Have the calls that wait look for messages, and at the places to pop."""
        self._changed.set()
        self._changed = anyio.Event()

    # -- places ------------------------------------------------------------------------------------

    async def _ask_all(self, call: Receive) -> None:
        """Have a POP under way at each broker of each topic."""
        for subscription in self._subscriptions:
            nowhere = _Place(subscription, "")
            try:
                queues = await self._queues(subscription.topic)
            except HeadraceError as error:
                if error.retryable:
                    self._instance.outages.report(error, subscription.topic)
                call.places.add(nowhere)
                call.note(nowhere, error)
                continue
            places = {_Place(subscription, each.broker_name, each.queue_id) for each in queues}
            self._look_at(subscription, places)
            call.look_at(subscription, places)
            for place in places:
                self._ask(call, place)

    def _look_at(self, subscription: Subscription, places: set[_Place]) -> None:
        """Pop a subscription there. A POP held elsewhere is not repeated once it is answered."""
        gone = self._places.get(subscription, set()) - places
        self._places[subscription] = places
        for place in gone:
            self._failures.pop(place, None)

    def _has_left(self, place: _Place) -> bool:
        return place not in self._places[place.subscription]

    async def _queues(self, topic: str) -> Sequence[MessageQueue]:
        names = await self._brokers(topic)
        if self.shares is not None:
            return await self.shares.of(topic, names)
        return [MessageQueue(topic, name, ANY_QUEUE) for name in names]

    async def _brokers(self, topic: str) -> list[str]:
        route = await self._instance.route(topic)
        if route.is_static:
            raise ConfigurationError(
                f"{topic} is a static topic, whose messages can't be taken out: read it with a "
                "Consumer that pulls"
            )
        return sorted({queue.broker_name for queue in route.read_queues})

    def _ask(self, call: Receive, place: _Place) -> None:
        if place not in self._polled:
            call.pending.add(place)
            self._polled.add(place)
            self._begin(self._poll, place)

    def _is_wanted(self, place: _Place) -> bool:
        now = anyio.current_time()
        return (
            self._is_open
            and not self._kept
            and any(
                place in call.places and (place in call.pending or call.until > now)
                for call in self._calls
            )
        )

    async def _poll(self, place: _Place) -> None:
        pacer = Pacer()
        try:
            while self._is_wanted(place):
                pacer.begin()
                has_progress = await self._poll_once(place)
                if delay_s := pacer.delay_s(progress=has_progress):
                    await anyio.sleep(delay_s)
        finally:
            self._polled.discard(place)
            self.look_again()

    async def _poll_once(self, place: _Place) -> bool:
        """POP once; returns whether there were messages."""
        subscription, broker_name, queue_id = place
        topic, instance = subscription.topic, self._instance
        calls, now = self._calls, anyio.current_time()
        pop = Pop(
            self._member,
            subscription,
            broker_name,
            queue_id,
            sum(call.count for call in calls),
            max(0, round(1000 * (max(call.until for call in calls) - now))),
            calls[0].invisible_ms,
        )
        try:
            address = await instance.broker_address(topic, broker_name)
            popped = await pop.ask(await instance.connection(address), self.given)
        except HeadraceError as error:
            self._note(place, error)
            if error.retryable:
                await pause_after(instance, error, topic, broker_name)
            elif error.refresh_route:
                instance.invalidate_route(topic)
            return False
        instance.outages.answered(topic, address)
        if popped.messages and self.rates is not None:
            self.rates.of(topic).pulled(len(popped.messages), anyio.current_time() - now)
        return self._accept(place, popped, pop.invisible_ms / 1000)

    def _accept(self, place: _Place, popped: Popped, invisible_s: float) -> bool:
        until = anyio.current_time() + KEPT_SHARE * invisible_s
        if self._has_left(place):
            self._begin(self._leases.give_back, popped.messages)
        else:
            self._kept += [_Kept(message, until) for message in popped.messages]
        if popped.others:
            self._begin(self._leases.try_ack, popped.others)
        self._note(place, None)
        return bool(popped.messages or popped.others)

    def _note(self, place: _Place, error: HeadraceError | None) -> None:
        if error is None or self._has_left(place):
            self._failures.pop(place, None)
        else:
            known = self._failures.get(place)
            since = known.since if known else anyio.current_time()
            self._failures[place] = Failure(since, error)
        for call in self._calls:
            call.note(place, error)
        self.look_again()
