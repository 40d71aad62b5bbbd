"""The demands on a message to a compacted topic: a key, and the queue of its key.

The key is the whole text of KEYS, also with blanks in it. A message without a body is a delete
marker; clients that can't send one send ``__DELETE__=true``, and the body is not stored.

Source: docs/compaction.md "Messages"; tests/broker/compaction/test_compaction_keys.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from zlib_ng.zlib_ng import crc32

from headrace_broker.message_demands import makes_demand
from headrace_broker.topics.attributes import CompactionPolicy
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.java_hash import java_hash
from headrace_protocol.message import DELETE, KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.message_demands import SentMessage
    from headrace_protocol.bodies import TopicConfig

# More than a record's head, its topic and the properties that the broker adds.
_RECORD_REST_BYTES: Final = 1024


class LogicQueues(Protocol):
    """The queues of static topics, each a chain of physical queues; of others, the queues."""

    def is_static(self, topic: str) -> bool:
        """True if a topic is static."""

    def of_keys(self, topic: str, queue_id: int, queue_count: int) -> tuple[int, int]:
        """The number of a queue among those that producers choose from, and the number of these.

        queue_count: of the topic at this broker.
        """

    def has_older(self, topic: str, queue_id: int) -> bool:
        """True if other queues may have values that the delete markers of a queue hide."""


class KeyDemand:
    """Rejects messages without a key or in another queue than their key's; empties markers."""

    def __init__(
        self,
        find_topic: Callable[[str], TopicConfig | None],
        record_bytes_max: int,
        logic_queues: LogicQueues,
    ) -> None:
        """record_bytes_max: most bytes of a record that a compaction log can hold."""
        self._find_topic = find_topic
        self._logic_queues = logic_queues
        self._record_bytes_max = record_bytes_max

    def matches(self, topic: str) -> bool:
        """True if a topic is compacted."""
        return self._policy(topic) is not None

    def _policy(self, topic: str) -> CompactionPolicy | None:
        config = self._find_topic(topic)
        return CompactionPolicy.of(config) if config is not None else None

    def serve(self, message: SentMessage) -> None:
        """See ``Demand.apply``."""
        values = message.values()
        key = values.get(KEYS, "")
        if not key.strip():
            raise _illegal(
                message.topic,
                "has no key: set KEYS, since the topic keeps the newest message of each key",
            )
        self._check_queue(message, key)
        self._check_size(message)
        if makes_demand(values.get(DELETE, "")) and message.body != b"":
            message.body = b""

    def _check_size(self, message: SentMessage) -> None:
        size = message.record_bytes
        if message.body is not None:
            size = len(message.body) + len(message.raw_properties) + _RECORD_REST_BYTES
        if size > self._record_bytes_max:
            raise _illegal(
                message.topic,
                f"takes {size} bytes, and a file of its compaction log at most "
                f"{self._record_bytes_max} (compactionMappedFileSize): send a smaller one",
            )

    def _check_queue(self, message: SentMessage, key: str) -> None:
        topic = self._find_topic(message.topic)
        policy = CompactionPolicy.of(topic) if topic is not None else None
        if topic is None or policy is None or policy.key_queue == "any":
            return
        here, queue_count = self._logic_queues.of_keys(
            message.topic, message.queue_id, topic.write_queue_nums
        )
        queue_id = queue_of_key(policy.key_queue, key, queue_count)
        if queue_id != here:
            raise _illegal(
                message.topic,
                f"with key {key[:64]!r} belongs to queue {queue_id}, not {here} "
                f"(key.queue={policy.key_queue}): send all messages of a key to its queue",
            )


def queue_of_key(rule: str, key: str, queue_count: int) -> int:
    """The queue of a key on a broker, by the ``key.queue`` of its topic, ``java`` or ``headrace``.

    Clients choose among the queues of all brokers; if these have equally many, the choice on the
    broker is the same. A static topic's queues are those of all brokers.
    """
    if rule == "java":
        return abs(java_hash(key)) % queue_count
    return crc32(key.encode(errors="surrogateescape")) % queue_count


def _illegal(topic: str, problem: str) -> RequestError:
    return RequestError(
        ResponseCode.MESSAGE_ILLEGAL,
        f"a message to the compacted topic {topic} {problem}; nothing was stored",
    )
