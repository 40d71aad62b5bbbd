"""This broker's mappings of static topics: config/topicQueueMapping.json, also Apache's file.

A topic is static if it has a mapping or a mark. One whose mapping is lost, damaged or another
broker's is rejected by name and never served as a plain topic.

Source: docs/static-topics.md; docs/store-format.md "topicQueueMapping.json";
tests/broker/statictopic/test_static_table.py.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from headrace_broker.persistence import SavedFile, load_table, next_version, with_breaks
from headrace_broker.statictopic.mark import MARK_NAME, StaticMarks
from headrace_broker.statictopic.queue_life import NO_CLAIM, TRANSITIONS, Claim, Event, State, Stop
from headrace_broker.store.errors import StoreFormatError
from headrace_broker.store.files.config_file import ConfigSource
from headrace_protocol.bodies import DataVersion
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.fastjson import Written, dumps_sliced
from headrace_protocol.statictopic.checks import BadMapping, check_detail
from headrace_protocol.statictopic.mapping import MappingInfo, encode_detail
from headrace_protocol.statictopic.mapping_file import decode_entries, entry_text, file_text
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace_broker.persistence import NowMs
    from headrace_broker.queue_directory import Lookup, QueueDirectory
    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_protocol.fastjson import Buffer
    from headrace_protocol.statictopic.mapping import TopicMapping

log = structlog.get_logger("headrace.broker")

MAPPING_NAME = "topicQueueMapping.json"
INCARNATION_PREFIX = "static-"
# About a millisecond.
_INFOS_AT_ONCE = 32
# Apache's tools do not tell the old leader when the new one is decided.
_CLAIM_MS = 3000


class Unusable(NamedTuple):
    """A mapping that this broker can't serve.

    mapping: the file's entry, which is kept; None if there is none.
    """

    mapping: TopicMapping | None
    reason: str


class MappingTable:
    """The mappings of all static topics.

    change_count: grows with every change of a mapping or of the queues that this broker leads.
    saved: the table's file. marks: the topics that are static, whatever happens to their mappings.
    is_verified: False from the start of the broker until it has compared its mappings with the
    nameservers' routes; it leads no queue before.
    undecided: queues whose newest item has no logicOffset, with the ms at which that was noticed.
    """

    def __init__(self, broker_name: str, file: ConfigFile, now_ms: NowMs) -> None:
        """Load the table. Raises StoreFormatError if the marks can't be read."""
        self.broker_name = broker_name
        self.change_count = 0
        self.is_verified = True
        self.saved = SavedFile(file, self._snapshot)
        self.marks = StaticMarks(file.beside(MARK_NAME))
        self._now_ms = now_ms
        self._subscribers: list[Callable[[], None]] = []
        self._mappings: dict[str, TopicMapping] = {}
        self._unusable: dict[str, Unusable] = {}
        # By topic and logic queue, those that the mapping leads and that take no messages.
        self._stopped: dict[tuple[str, int], Stop] = {}
        # By topic and logic queue, when the last item was first seen without a logicOffset.
        self.undecided: dict[tuple[str, int], int] = {}
        # Queues that were closed and are registered until the new leader is: physical queue, ms.
        self._claims: dict[tuple[str, int], tuple[int, int]] = {}
        # Compressed to a tenth.
        self._texts: dict[str, tuple[object, bytes]] = {}
        self.data_version = DataVersion()
        self._load(file)

    def _load(self, file: ConfigFile) -> None:
        lost = f"its entry in {file.path} is missing"
        try:
            found = load_table(file, self._decode)
        except StoreFormatError as error:
            log.error("mappings of static topics lost", reason=str(error))
            found, lost = None, str(error)
            # So that the first save keeps the damaged file.
            file.source = ConfigSource.BACKUP
        entries: dict[str, TopicMapping | Unusable] = {}
        if found is not None:
            entries, self.data_version = found
        for topic, entry in entries.items():
            if isinstance(entry, Unusable):
                self._unusable[topic] = entry
            else:
                self._mappings[topic] = entry
        for name in self.marks:
            if name not in entries:
                self._unusable[name] = Unusable(None, lost)
        for name, unusable in self._unusable.items():
            log.error("static topic refused", topic=name, reason=unusable.reason)
        self.marks.add_all(
            {usable.topic: new_incarnation(usable.epoch) for usable in self._mappings.values()}
        )
        for topic in self._mappings:
            self._note_undecided(topic)

    def _decode(self, data: Buffer) -> tuple[dict[str, TopicMapping | Unusable], DataVersion]:
        """The entries of the file. Raises ValueError."""
        return decode_entries(data, self._entry)

    def _entry(self, topic: str, mapping: TopicMapping) -> TopicMapping | Unusable:
        hosted = dict(sorted(mapping.hosted.items()))
        mapping = msgspec.structs.replace(mapping, topic=topic, hosted=hosted)
        try:
            check_detail(mapping, self.broker_name)
        except BadMapping as error:
            return Unusable(mapping, str(error))
        return mapping

    def __len__(self) -> int:
        return len(self._mappings) + len(self._unusable)

    # -- lookups -----------------------------------------------------------------------------------

    def get(self, topic: str) -> TopicMapping | None:
        """The mapping of a static topic; None for other topics, and if it can't be used."""
        return self._mappings.get(topic)

    @property
    def is_empty(self) -> bool:
        """True if no mapping can be used."""
        return not self._mappings

    def all(self) -> list[TopicMapping]:
        """The mappings that can be used."""
        return list(self._mappings.values())

    def is_static(self, topic: str) -> bool:
        """True for a static topic, also if its mapping can't be used."""
        return topic in self._mappings or topic in self._unusable or topic in self.marks

    def unusable(self) -> dict[str, str]:
        """The reasons why mappings can't be used, by topic."""
        return {topic: unusable.reason for topic, unusable in self._unusable.items()}

    def check_usable(self, topic: str) -> None:
        """Raise RequestError for a static topic whose mapping can't be used."""
        if topic in self._mappings or not self.is_static(topic):
            return
        unusable = self._unusable.get(topic)
        reason = unusable.reason if unusable else "it has none: it is being deleted"
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"topic[{topic}] is static, and broker {self.broker_name} can't use its mapping: "
            f"{reason}; run `headrace topic repair {topic}`, or delete the topic",
        )

    def reject_unusable(self, _directory: QueueDirectory, lookup: Lookup) -> RequestError | None:
        """A ``FindPlace`` that rejects requests for topics whose mapping can't be used."""
        try:
            self.check_usable(lookup.topic.topic_name)
        except RequestError as error:
            return error
        return None

    def leads(self, topic: str, queue: int) -> int | None:
        """The physical queue that takes a logic queue's messages; None if it isn't here."""
        mapping = self._mappings.get(topic)
        chain = mapping.chain(queue) if mapping is not None else None
        if chain is None or not self.is_verified or (topic, queue) in self._stopped:
            return None
        leader = chain[-1]
        return leader.queue_id if leader.bname == self.broker_name else None

    def led(self, topic: str) -> dict[int, int]:
        """Physical queue of each logic queue of a topic that takes messages here."""
        mapping = self._mappings.get(topic)
        if mapping is None or not self.is_verified:
            return {}
        led = mapping.led()
        return {queue: at for queue, at in led.items() if (topic, queue) not in self._stopped}

    def led_count(self) -> int:
        """The number of logic queues that take messages here."""
        if not self.is_verified:
            return 0
        return sum(len(mapping.led()) for mapping in self._mappings.values()) - len(self._stopped)

    def stopped(self, topic: str, queue: int) -> str | None:
        """The reason why a queue takes no messages although it is this broker's by the mapping."""
        stop = self._stopped.get((topic, queue))
        return stop.reason if stop else None

    # -- encoded -----------------------------------------------------------------------------------

    def detail(self, topic: str) -> Written | None:
        """The mapping of a topic as JSON, with quoted keys; None without one."""
        mapping = self._mappings.get(topic)
        if mapping is None:
            return None
        return Written((encode_detail(mapping, strict=True),))

    async def details(self, topics: Iterable[str]) -> Written:
        """The mappings of topics as JSON, with a break after each."""
        found: dict[str, Written] = {}
        for topic in topics:
            if (detail := self.detail(topic)) is not None:
                found[topic] = detail
                await take_break()
        return await dumps_sliced(found.items())

    async def infos(self) -> Written:
        """By topic, the queues led here, as nameservers get them: JSON, with breaks in between."""
        found: dict[str, Written] = {}
        for number, mapping in enumerate(self.all(), 1):
            found[mapping.topic] = Written((msgspec.json.encode(self._info(mapping)),))
            if not number % _INFOS_AT_ONCE:
                await take_break()
        return await dumps_sliced(found.items())

    def _info(self, mapping: TopicMapping) -> MappingInfo:
        return MappingInfo(
            topic=mapping.topic,
            scope=mapping.scope,
            total_queues=mapping.total_queues,
            bname=mapping.bname,
            epoch=mapping.epoch,
            dirty=mapping.dirty,
            curr_id_map=self.led(mapping.topic) | self._claimed(mapping.topic),
        )

    def _claimed(self, topic: str) -> dict[int, int]:
        return {key[1]: at for key, (at, _) in self._claims.items() if key[0] == topic}

    # -- changes -----------------------------------------------------------------------------------

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call ``subscriber`` after every change of ``change_count``."""
        self._subscribers.append(subscriber)

    def put(self, mapping: TopicMapping) -> None:
        """Create or replace a checked mapping."""
        self._unusable.pop(mapping.topic, None)
        self._mappings[mapping.topic] = mapping
        led = mapping.led()
        for queue, stop in self._stops_of(mapping.topic):
            if queue not in led:
                self.apply(mapping.topic, queue, Event.LOSE)
            elif stop.claim.epoch < mapping.epoch:
                self.apply(mapping.topic, queue, Event.RENEW)
        self._note_undecided(mapping.topic)
        self._drop_claims(lambda key, _: key[0] == mapping.topic and key not in self.undecided)
        self._saved_changed()

    def remove(self, topic: str) -> None:
        """Remove the mapping of a topic that is deleted; its mark stays."""
        was_usable = self._mappings.pop(topic, None) is not None
        if self._unusable.pop(topic, None) is not None or was_usable:
            for queue, _ in self._stops_of(topic):
                self.apply(topic, queue, Event.LOSE)
            self._note_undecided(topic)
            self._drop_claims(lambda key, _: key[0] == topic)
            self._saved_changed()

    def state(self, topic: str, queue: int) -> State:
        """The state of a logic queue that the mapping gives to this broker."""
        stop = self._stopped.get((topic, queue))
        return stop.state if stop else State.SERVING

    def apply(self, topic: str, queue: int, event: Event, claim: Claim = NO_CLAIM) -> bool:
        """Change a queue's state; return whether it has changed.

        Call ``leads_changed`` afterwards. claim: for CLAIM.
        """
        before = self.state(topic, queue)
        after = TRANSITIONS[before, event]
        if after is before:
            return False
        if after is State.SERVING:
            del self._stopped[topic, queue]
        else:
            self._stopped[topic, queue] = Stop(after, claim)
        return True

    def apply_to_all(self, topic: str, event: Event) -> None:
        """Change the states of a topic's queues that take no messages."""
        for queue, _ in self._stops_of(topic):
            self.apply(topic, queue, event)
        self.leads_changed()

    def _stops_of(self, topic: str) -> list[tuple[int, Stop]]:
        return [(key[1], stop) for key, stop in self._stopped.items() if key[0] == topic]

    def claim(self, topic: str, closed: Mapping[int, int]) -> None:
        """Keep closed queues registered while their new leader is undecided.

        A client that looked up the route now would find no leader, and Apache's fails then. This
        broker passes its requests on. The new leader's epoch is higher, so its own claim counts.
        """
        for queue, physical in closed.items():
            if (topic, queue) in self.undecided:
                self._claims[topic, queue] = physical, self._now_ms()

    def expire_claims(self) -> bool:
        """Drop the claims of closed queues after three seconds; return whether there were any."""
        before_ms = self._now_ms() - _CLAIM_MS
        return self._drop_claims(lambda _, since_ms: since_ms <= before_ms)

    def _drop_claims(self, is_over: Callable[[tuple[str, int], int], bool]) -> bool:
        over = [key for key, (_, since_ms) in self._claims.items() if is_over(key, since_ms)]
        for key in over:
            del self._claims[key]
        return bool(over)

    def _note_undecided(self, topic: str) -> None:
        """Note since when queues of a topic are undecided."""
        mapping = self._mappings.get(topic)
        keys = {(topic, queue) for queue in mapping.undecided()} if mapping else set()
        for key in [key for key in self.undecided if key[0] == topic]:
            if key not in keys:
                del self.undecided[key]
        for key in keys:
            self.undecided.setdefault(key, self._now_ms())

    def leads_changed(self) -> None:
        """Invalidate lookups after ``apply`` or a change of ``is_verified``."""
        self.change_count += 1
        for subscriber in self._subscribers:
            subscriber()

    def _saved_changed(self) -> None:
        self.data_version = next_version(self.data_version, self._now_ms())
        self.leads_changed()
        self.saved.changed()

    # -- the file ----------------------------------------------------------------------------------

    def _snapshot(self) -> Callable[[], bytes]:
        entries = dict(self._mappings)
        for topic, unusable in self._unusable.items():
            if unusable.mapping is not None:
                entries[topic] = unusable.mapping
        version = self.data_version
        return lambda: file_text(self._entry_texts(entries), version)

    def _entry_texts(self, entries: dict[str, TopicMapping]) -> Iterator[bytes]:
        """The texts of all entries; encodes only those that changed since the last call."""
        texts = self._texts
        for topic in texts.keys() - entries.keys():
            del texts[topic]
        changed = [each for each in entries.items() if texts.get(each[0], _NONE)[0] is not each[1]]
        for topic, mapping in with_breaks(changed):
            texts[topic] = mapping, zlib.compress(entry_text(mapping), 1)
        return (zlib.decompress(text) for _, text in with_breaks(texts.values()))


_NONE = (None, b"")


def new_incarnation(epoch: int) -> str:
    """The incarnation id of a static topic that was created at an epoch: equal on all brokers."""
    return f"{INCARNATION_PREFIX}{epoch:x}"
