"""The table of topics: config/topics.json.

Source: docs/protocol.md "Topics"; tests/broker/topics/test_topics.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from headrace_broker.host_budget import Host, HostBudget
from headrace_broker.persistence import (
    SavedFile,
    TableText,
    field_text,
    file_text,
    load_table,
    next_version,
    warn_if_missing,
)
from headrace_broker.topics.attributes import is_batched
from headrace_broker.topics.incarnations import Incarnations
from headrace_protocol.bodies import (
    PERM_INHERIT,
    PERM_READ,
    PERM_WRITE,
    DataVersion,
    TopicConfig,
    TopicConfigSerializeWrapper,
)
from headrace_protocol.bounds import check_perm, check_queue_nums, check_topic
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.forbidden import ForbiddenType, reading_forbidden
from headrace_protocol.system_topics import (
    BENCHMARK_TOPIC,
    DEFAULT_TOPIC,
    DLQ_PREFIX,
    GROUP_PREFIXES,
    HALF_TOPIC,
    OFFSET_MOVED_TOPIC,
    OP_HALF_TOPIC,
    RETRY_PREFIX,
    ROCKSDB_HALF_TOPIC,
    ROCKSDB_OP_HALF_TOPIC,
    SCHEDULE_TOPIC,
    SELF_TEST_TOPIC,
    TIMER_TOPIC,
    broker_member_topic,
    is_own_topic,
    reply_topic,
    revive_log_topic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace_broker.config import BrokerConfig
    from headrace_broker.persistence import NowMs
    from headrace_broker.store.files.config_file import ConfigFile
    from headrace_protocol.channel import Channel

# Memory of a topic, in tables and in files.
_TOPIC_BYTES = 3 * 1024
_PERM_ALL = PERM_READ | PERM_WRITE | PERM_INHERIT

_DELAY_LEVELS = 18


def _system_topics(config: BrokerConfig) -> dict[str, TopicConfig]:
    """Topics that the peer creates at its first start."""
    cluster, broker = config.broker_cluster_name, config.broker_name
    topics = [
        _topic(SELF_TEST_TOPIC, 1),
        _topic(BENCHMARK_TOPIC, 1024),
        _topic(cluster, 16, _PERM_ALL if config.cluster_topic_enable else PERM_INHERIT),
        _topic(broker, 1, _PERM_ALL if config.broker_topic_enable else PERM_INHERIT),
        _topic(OFFSET_MOVED_TOPIC, 1),
        _topic(SCHEDULE_TOPIC, _DELAY_LEVELS),
        _topic(reply_topic(cluster), 1),
        _topic(revive_log_topic(cluster), 8),
        _topic(broker_member_topic(broker), 1, PERM_INHERIT),
        _topic(HALF_TOPIC, 1),
        _topic(OP_HALF_TOPIC, 1),
        _topic(ROCKSDB_HALF_TOPIC, 1),
        _topic(ROCKSDB_OP_HALF_TOPIC, 1),
        _topic(TIMER_TOPIC, 1),
    ]
    if config.auto_create_topic_enable:
        topics.append(_topic(DEFAULT_TOPIC, config.default_topic_queue_nums, _PERM_ALL))
    if config.trace_topic_enable:
        topics.append(_topic(config.msg_trace_topic_name, 1))
    return {topic.topic_name: topic for topic in topics}


def _topic(name: str, queue_nums: int, perm: int = PERM_READ | PERM_WRITE) -> TopicConfig:
    return TopicConfig(
        topic_name=name, read_queue_nums=queue_nums, write_queue_nums=queue_nums, perm=perm
    )


class TopicTable:
    """All topics of the broker; an entry is replaced, never changed.

    change_count: grows with every change, to invalidate caches.
    saved: the table's file. incarnations: ids of the topics.
    """

    def __init__(
        self,
        config: BrokerConfig,
        file: ConfigFile,
        now_ms: NowMs,
        budget: HostBudget | None = None,
        log_end: Callable[[], int] = lambda: 0,
    ) -> None:
        """Load the table. Raises StoreFormatError if its file can't be read.

        log_end: returns the physical offset of the end of the log.
        """
        self.change_count = 0
        self._budget = budget or HostBudget()
        self._subscribers: list[Callable[[TopicConfig | None], None]] = []
        self._config = config
        self.saved = SavedFile(file, self._snapshot)
        self._text = TableText()
        self._now_ms = now_ms
        found = load_table(file, TopicConfigSerializeWrapper.decode)
        loaded = found or TopicConfigSerializeWrapper()
        self.data_version: DataVersion = loaded.data_version
        self._topics = _system_topics(config)
        self._system_names = frozenset(self._topics) | {DEFAULT_TOPIC}
        self._topics.update(loaded.topic_config_table)
        # Each raises RequestError unless a topic may be created or become the given one.
        self.rules: list[Callable[[str, TopicConfig | None], None]] = []
        # Deleted topics whose queues still exist: new queues would reuse their files.
        self._being_deleted: set[str] = set()
        # Deleted topics that the file keeps until no crash can bring back their queues.
        self._kept_in_file: dict[str, TopicConfig] = {}
        self.incarnations = Incarnations(
            file.beside("topicIncarnation.json"),
            {topic for topic in self._topics if not self.is_system(topic)},
            log_end,
        )
        self._is_lost = found is None
        if found is None:
            warn_if_missing(
                file,
                "topics must be created again, with the same queues, to reach their messages",
            )
            self._changed(None)

    def recovered(self, in_store: Iterable[str]) -> None:
        """Note that the store is recovered. in_store: topics of which it has queues."""
        self.incarnations.recovered(in_store if self._is_lost else ())

    def __len__(self) -> int:
        return len(self._topics)

    # -- lookups -----------------------------------------------------------------------------------

    def get(self, topic: str) -> TopicConfig | None:
        """A topic, or None if it does not exist."""
        return self._topics.get(topic)

    def readable_queues(self, topic: str) -> int:
        """Number of queues that consumers may read; 0 if the topic does not exist."""
        config = self._topics.get(topic)
        return config.read_queue_nums if config and config.perm & PERM_READ else 0

    def all(self) -> Iterable[TopicConfig]:
        """Every topic."""
        return self._topics.values()

    def expect(self, topic: str) -> TopicConfig:
        """A topic that must exist. Raises RequestError."""
        config = self._topics.get(topic)
        if config is None:
            raise self._unknown(topic)
        return config

    def is_batched(self, topic: str) -> bool:
        """True if a topic exists and has batch queues."""
        config = self._topics.get(topic)
        return config is not None and is_batched(config)

    def is_system(self, topic: str) -> bool:
        """True if a topic belongs to the broker and not to its users."""
        return topic in self._system_names or is_own_topic(topic)

    def _is_owned(self, topic: str) -> bool:
        """True if a topic belongs to whoever makes it, not to a group or to the broker."""
        return not self.is_system(topic) and not topic.startswith(GROUP_PREFIXES)

    def check_writable(self, topic: TopicConfig) -> None:
        """Raise RequestError if clients may not send to ``topic``."""
        self.check_broker_writable()
        _check_not_own(topic.topic_name)
        self.check_deliverable(topic)

    def check_broker_writable(self) -> None:
        """Raise RequestError when this broker takes no messages of clients."""
        if not self._config.broker_permission & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._config.broker_name}] sending message is forbidden: its "
                "brokerPermission has no write bit, send to another broker",
            )

    def check_broker_readable(self) -> None:
        """Raise RequestError when this broker gives no messages to clients."""
        if not self._config.broker_permission & PERM_READ:
            raise reading_forbidden(
                ForbiddenType.BROKER,
                f"the broker[{self._config.broker_name}] pulling message is forbidden: its "
                "brokerPermission has no read bit, read from another broker",
            )

    def check_deliverable(self, topic: TopicConfig) -> None:
        """Raise RequestError when a topic takes no new messages."""
        if not topic.perm & PERM_WRITE:
            raise RequestError(
                ResponseCode.NO_PERMISSION,
                f"the topic[{topic.topic_name}] sending message is forbidden: its perm is "
                f"{topic.perm}, give it {topic.perm | PERM_WRITE} with mqadmin updateTopicPerm",
            )

    def check_readable(self, topic: str) -> TopicConfig:
        """A topic that may be read. Raises RequestError."""
        self.check_broker_readable()
        config = self.expect(topic)
        if not config.perm & PERM_READ:
            raise reading_forbidden(
                ForbiddenType.TOPIC,
                f"the topic[{topic}] pulling message is forbidden: its perm is {config.perm}, "
                f"give it {config.perm | PERM_READ} with mqadmin updateTopicPerm",
            )
        return config

    def check_deletable(self, topic: str) -> None:
        """Raise RequestError for a topic of the broker."""
        if self.is_system(topic):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"The topic[{topic}] is conflict with system topic: the broker needs it",
            )

    def check_changeable(self, topic: str, new: TopicConfig | None = None) -> None:
        """Raise RequestError for a topic that can't be created or changed, or not like this.

        new: its settings after the change; None for those that a first message gives it.
        """
        for rule in self.rules:
            rule(topic, new)

    def check_puttable(self, topic: str) -> None:
        """Raise RequestError for a topic that ``put_changed`` can't create or replace."""
        if self.is_system(topic):
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"The topic[{topic}] is conflict with system topic: choose another name",
            )
        self._check_not_being_deleted(topic)
        if topic not in self._topics:
            self._budget.makers.check("topics", 1)

    def registered(self, broker_permission: int) -> dict[str, TopicConfig]:
        """The table to register at nameservers, without permissions that the broker lacks."""
        allowed = broker_permission | ~(PERM_READ | PERM_WRITE)
        if not ~allowed:
            return self._topics
        return {
            name: msgspec.structs.replace(topic, perm=topic.perm & allowed)
            for name, topic in self._topics.items()
        }

    def wrapper(self) -> TopicConfigSerializeWrapper:
        """The table in the form of message bodies."""
        return TopicConfigSerializeWrapper(
            topic_config_table=self._topics, data_version=self.data_version
        )

    # -- changes -----------------------------------------------------------------------------------

    def subscribe(self, subscriber: Callable[[TopicConfig | None], None]) -> None:
        """Call ``subscriber`` after every change, with the topic put, or None after a deletion.

        Not an argument of the constructor, since most subscribers need the table themselves.
        """
        self._subscribers.append(subscriber)

    def registration_changed(self) -> None:
        """Invalidate caches, and register again, after a change of other data than the topics."""
        self.lookups_changed()
        self.data_version = next_version(self.data_version, self._now_ms())
        self._notify(None)

    def lookups_changed(self) -> None:
        """Invalidate caches of lookups although no topic has changed."""
        self.change_count += 1

    def put(self, topic: TopicConfig) -> None:
        """Create or replace a topic. Raises RequestError if the config is invalid."""
        self.put_all([topic])

    def put_all(self, topics: list[TopicConfig]) -> None:
        """Create or replace topics, all or none. Raises RequestError."""
        for topic in topics:
            check_config(topic)
        changed = [topic for topic in topics if self._topics.get(topic.topic_name) != topic]
        created = [each.topic_name for each in changed if each.topic_name not in self._topics]
        for name in created:
            self._check_not_being_deleted(name)
        if created:
            if owned := list(filter(self._is_owned, created)):
                self._budget.makers.check("topics", len(owned))
                self._budget.makers.made("topics", owned)
            self.incarnations.created(created)
        for topic in changed:
            self._topics[topic.topic_name] = topic
        if changed:
            self._changed(changed[-1])

    def put_changed(self, topic: TopicConfig, incarnation: str) -> None:
        """Create or replace a checked topic, and register it again even if it is as before.

        incarnation: the id of the topic if it is new. The file of one that is as before stays.
        """
        if self._topics.get(topic.topic_name) == topic:
            self.registration_changed()
            return
        if topic.topic_name not in self._topics:
            self.incarnations.assign(topic.topic_name, incarnation)
            self._budget.makers.made("topics", [topic.topic_name])
        self._topics[topic.topic_name] = topic
        self._changed(topic)

    def _check_not_being_deleted(self, topic: str) -> None:
        """Raise RequestError while the queues of a deleted topic of this name still exist."""
        if topic in self._being_deleted:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"topic {topic} is being deleted: retry once its queues are gone",
            )

    @contextmanager
    def deleting(self, topic: str) -> Iterator[bool]:
        """Delete a topic and reject its re-creation inside the block; yields whether it existed.

        The file keeps it until ``deleted``: a start after a crash must not bring its queues back
        for a topic that can be created anew. After an error its queues are still there, so the
        re-creation is rejected until the next start.
        """
        config = self._topics.get(topic)
        if config is None:
            yield False
            return
        self._kept_in_file[topic] = config
        self.delete(topic)
        self._being_deleted.add(topic)
        yield True
        self._being_deleted.discard(topic)

    def deleted(self, topic: str) -> None:
        """Drop a deleted topic from the file: the deletion of its queues is on disk."""
        if self._kept_in_file.pop(topic, None) is not None:
            self.saved.changed()

    def delete(self, topic: str) -> bool:
        """Remove a topic; return whether it existed."""
        if self._topics.pop(topic, None) is None:
            return False
        self._budget.drop(("topic", topic))
        self._budget.makers.gone("topics", topic)
        self.incarnations.deleted(topic)
        self._changed(None)
        return True

    def when_saved(self, callback: Callable[[Exception | None], None]) -> None:
        """Call back once all changes so far are on disk, or with the error that prevented it."""

        def on_incarnations_saved(error: Exception | None) -> None:
            if error:
                callback(error)
            else:
                self.saved.when_saved(callback)

        self.incarnations.saved.when_saved(on_incarnations_saved)

    def create_on_send(
        self,
        topic: str,
        default_topic: str,
        queue_nums: int,
        channel: Channel,
        before_create: Callable[[], None] = lambda: None,
    ) -> TopicConfig:
        """The topic of a message; created if missing and ``default_topic`` can be inherited.

        queue_nums: number of queues that the sender requests; the default topic's is the maximum.
        channel: of the sender; the topic counts for its host. before_create: raises RequestError
        unless the sender may create it.

        Raises RequestError if the topic does not exist and can't be created.
        """
        known = self._topics.get(topic)
        if known is not None:
            return known
        check_topic(topic)
        _check_not_own(topic)
        self.check_changeable(topic)
        if topic.startswith(RETRY_PREFIX):
            before_create()
            return self._create(_topic(topic, 1), channel)
        default = self._topics.get(default_topic)
        if default is None or not self._is_inherited(default):
            raise self._unknown(topic)
        if queue_nums < 1:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"topic {topic} does not exist and {channel.address} requests it with {queue_nums} "
                "queues: at least 1 is needed (defaultTopicQueueNums of the producer)",
            )
        before_create()
        return self._create(
            TopicConfig(
                topic_name=topic,
                read_queue_nums=min(queue_nums, default.write_queue_nums),
                write_queue_nums=min(queue_nums, default.write_queue_nums),
                perm=default.perm & ~PERM_INHERIT,
                topic_filter_type=default.topic_filter_type,
                topic_sys_flag=default.topic_sys_flag,
            ),
            channel,
        )

    def create_retry_topic(self, group: str, queue_nums: int = 1) -> TopicConfig:
        """The topic of messages that a group gets again; created if missing."""
        return self._create(_topic(RETRY_PREFIX + group, queue_nums))

    def grow_retry_topic(self, group: str, queue_nums: int) -> None:
        """Give the retry topic of a group as many queues, if it exists and has fewer.

        It never shrinks: messages wait in its queues, or for them.
        """
        known = self._topics.get(RETRY_PREFIX + group)
        if known is not None and min(known.read_queue_nums, known.write_queue_nums) < queue_nums:
            self.put(
                msgspec.structs.replace(
                    known,
                    read_queue_nums=max(known.read_queue_nums, queue_nums),
                    write_queue_nums=max(known.write_queue_nums, queue_nums),
                )
            )

    def create_dlq_topic(self, group: str) -> TopicConfig:
        """The topic of messages that a group has given up on; created if missing."""
        return self._create(_topic(DLQ_PREFIX + group, 1))

    def create_system_topic(self, name: str) -> TopicConfig:
        """A topic of the broker's own with one queue; made when it is not there."""
        return self._create(_topic(name, 1))

    def _is_inherited(self, default: TopicConfig) -> bool:
        if default.topic_name == DEFAULT_TOPIC and not self._config.auto_create_topic_enable:
            return False
        return bool(default.perm & PERM_INHERIT)

    def _create(self, topic: TopicConfig, channel: Channel | None = None) -> TopicConfig:
        """channel: of the client for whose host the topic counts; None counts it for no host."""
        known = self._topics.get(topic.topic_name)
        if known is not None:
            return known
        check_config(topic)
        self._check_not_being_deleted(topic.topic_name)
        if channel is not None:
            self._budget.keep(Host.of(channel), ("topic", topic.topic_name), _TOPIC_BYTES)
        self.put(topic)
        return topic

    def _changed(self, topic: TopicConfig | None) -> None:
        self.change_count += 1
        self.data_version = next_version(self.data_version, self._now_ms())
        self.saved.changed()
        self._notify(topic)

    def _notify(self, topic: TopicConfig | None) -> None:
        for subscriber in self._subscribers:
            subscriber(topic)

    def _snapshot(self) -> Callable[[], bytes]:
        topics, version = {**self._kept_in_file, **self._topics}, self.data_version
        return lambda: file_text(
            {"dataVersion": field_text(version), "topicConfigTable": self._text.text(topics)}
        )

    def _unknown(self, topic: str) -> RequestError:
        return RequestError(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic[{topic}] not exist on broker {self._config.broker_name}: create it with "
            f"`headrace topic create {topic}`",
        )


def _check_not_own(topic: str) -> None:
    """Raise RequestError for a topic that only the broker itself writes to."""
    if is_own_topic(topic):
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            f"Sending message to topic[{topic}] is forbidden: the broker itself writes it, "
            "send to a topic of your own",
        )


def check_config(topic: TopicConfig) -> None:
    """Raise RequestError for invalid settings of a topic."""
    name = topic.topic_name
    check_topic(name)
    check_queue_nums(f"topic {name}: readQueueNums", topic.read_queue_nums)
    check_queue_nums(f"topic {name}: writeQueueNums", topic.write_queue_nums)
    check_perm(f"topic {name}: perm", topic.perm)


def unread_warning(topic: TopicConfig) -> str | None:
    """A warning about queues that are written but not read; None if there are none."""
    unread = topic.write_queue_nums - topic.read_queue_nums
    if unread <= 0:
        return None
    return (
        f"topic {topic.topic_name} has {topic.write_queue_nums} write queues and "
        f"{topic.read_queue_nums} read queues: messages in queues {topic.read_queue_nums} to "
        f"{topic.write_queue_nums - 1} reach no consumer. To shrink a topic, lower the write "
        "queues first, and the read queues once the rest is consumed"
    )
