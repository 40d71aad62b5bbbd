"""What must hold of a static topic: its history, and its mappings after each change of one.

As for a plain cluster (``history``), and besides:

- a key has one queue, unless queues were added;
- offsets ascend and are those of the acknowledgements; -1 is acknowledged only while a queue moves
  in available mode, and where all moves are strict, offsets have no gap;
- what an item of a chain has decided never changes, on any broker;
- where all moves are strict, one broker at most takes a queue's messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tests.simulation.history import History, PromiseBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.statictopic.table import MappingTable
    from headrace_protocol.bodies import MessageQueue
    from headrace_protocol.statictopic.mapping import MappingItem
    from tests.simulation.cluster import BrokerMachine
    from tests.support.faulty_files import FaultyFiles

# Each broker notes these for itself.
_OWN_FIELDS = {"end_offset", "time_of_start", "time_of_end"}
_UNDECIDED = -1


class StaticHistory(History):
    """Everything that happened to a static topic; it loses nothing, whatever is on its way.

    is_strict: whether all moves of its queues are. queue_count: with which it was created.
    """

    is_strict: bool = True
    queue_count: int = 0

    def check_dense(self) -> None:
        if self.is_strict:
            super().check_dense()
        for queue, messages in self.final.items():
            offsets = [offset for offset, _ in messages]
            if offsets != sorted(set(offsets)):
                raise PromiseBroken(f"{queue} holds the offsets {offsets}")

    def check_keys(self) -> None:
        """In available mode, sends at both brokers of a queue may overtake each other."""
        queues: dict[str, set[MessageQueue]] = defaultdict(set)
        for queue, messages in self.final.items():
            for _, body in messages:
                queues[self.sent[body].key].add(queue)
        for key, of_key in queues.items():
            if len(of_key) > 1 and len(self.final) == self.queue_count:
                raise PromiseBroken(f"{key} is in {sorted(of_key)}")
        if self.is_strict:
            super().check_keys()

    def check_acks(self) -> set[MessageQueue]:
        there = self._final_places()
        bodies = {(place.queue, body) for place, body in there.items()}
        for ack in self.acks:
            queue, offset = ack.place
            is_undecided = offset == _UNDECIDED
            if is_undecided:
                self.findings["acknowledged without an offset"] += 1
            if is_undecided and self.is_strict:
                raise PromiseBroken(f"{ack} has no offset in strict mode")
            if (queue, ack.body) not in bodies:
                raise PromiseBroken(f"{ack} is not there")
            if not is_undecided and there.get(ack.place) != ack.body:
                raise PromiseBroken(f"{ack} is not there, but {there.get(ack.place)!r}")
        return set()

    def _must_be_read(self, _queue: MessageQueue) -> bool:
        return True


class _Life(NamedTuple):
    """The table of one life of a broker; files: its disk, which is over when the life is."""

    table: MappingTable
    files: FaultyFiles


class MappingWatch:
    """Compares the brokers' mappings of a topic after each change.

    counts: how many changes, items and moves it has seen.
    """

    def __init__(self, topic: str, brokers: Iterable[BrokerMachine], *, is_strict: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._topic = topic
        self._brokers = {broker.name: broker for broker in brokers}
        self._is_strict = is_strict
        self._lives: dict[str, _Life] = {}
        # By queue and gen, the fields that have been decided; own ones by broker besides.
        self._decided: dict[tuple[Any, ...], int | str] = {}
        self._broken: PromiseBroken | None = None

    def check(self) -> None:
        """Raises the first PromiseBroken; the brokers go on until then."""
        if self._broken:
            raise self._broken

    def leads_changed(self, table: MappingTable) -> None:
        """A broker leads other queues than before."""
        self._lives[table.broker_name] = _Life(table, self._brokers[table.broker_name].files)
        if self._is_strict:
            self._note(self._check_leaders)

    def mapping_changed(self, table: MappingTable) -> None:
        """A broker has another mapping, which counts once it is on disk."""
        mapping = table.get(self._topic)
        if mapping is None:
            return
        hosted = mapping.unpacked().hosted

        def on_saved(problem: Exception | None) -> None:
            if problem is None:
                self.counts["changes of mappings"] += 1
                for queue, chain in hosted.items():
                    for item in chain:
                        self._note(self._check_item, table.broker_name, queue, item)

        table.saved.when_saved(on_saved)

    def _note(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except PromiseBroken as broken:
            self._broken = self._broken or broken

    def _check_item(self, broker: str, queue: int, item: MappingItem) -> None:
        for name, value in msgspec.structs.asdict(item).items():
            if value == _UNDECIDED:
                continue
            if self._is_strict and name == "end_offset":
                raise PromiseBroken(f"queue {queue} has a gap behind {item} on {broker}")
            owner = broker if name in _OWN_FIELDS else None
            before = self._decided.setdefault((queue, item.gen, name, owner), value)
            if before != value:
                raise PromiseBroken(
                    f"{name} of queue {queue}, gen {item.gen}, on {broker} was {before}: {item}"
                )

    def _check_leaders(self) -> None:
        leaders: dict[int, list[str]] = defaultdict(list)
        for name, life in self._lives.items():
            if self._brokers[name].files is life.files and not life.files.is_over:
                for queue in life.table.led(self._topic):
                    leaders[queue].append(name)
        for queue, names in leaders.items():
            if len(names) > 1:
                raise PromiseBroken(f"{names} take messages for queue {queue}")
