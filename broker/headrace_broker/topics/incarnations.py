"""Per-topic ids that tell a recreated topic from its predecessor.

Without them, readers that keep offsets would mistake a recreated topic for the old one. The file,
config/topicIncarnation.json, is headrace's own; Apache's brokers neither read nor write it.

Source: docs/protocol.md "Topics"; tests/broker/topics/test_incarnations.py.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING

import msgspec

from headrace_broker.persistence import SavedFile, load_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.files.config_file import ConfigFile

_RANDOM_BYTES = 4
_LOG_END = re.compile(r"([0-9a-f]{1,16})-")
_decoder = msgspec.json.Decoder(dict[str, str])


class Incarnations:
    """The id of each topic, created with the topic: where the log ended then, and random digits.

    The log offset is 0 for topics that are older than this file or were lost with the table.

    saved: the table's file. An id must be on disk before a client sees it.
    """

    def __init__(
        self,
        file: ConfigFile,
        topics: Iterable[str],
        log_end: Callable[[], int],
    ) -> None:
        """topics: all that exist.

        Raises StoreFormatError if the file can't be read.
        """
        self._log_end = log_end
        self._lost: set[str] = set()
        self.saved = SavedFile(file, self._snapshot)
        known = load_table(file, _decoder.decode) or {}
        self._ids = {topic: known.get(topic) or _new_id(0) for topic in topics}
        self._created_at = {topic: _log_end_in(name) for topic, name in self._ids.items()}
        if self._ids != known:
            self.saved.changed()

    def recovered(self, lost: Iterable[str]) -> None:
        """Note that the log is recovered. lost: topics of which only queues exist."""
        self._lost = {*lost}
        # A power cut may have cut the log: what is appended now is newer than every topic.
        end = self._log_end()
        self._created_at = {topic: min(at, end) for topic, at in self._created_at.items()}

    def of(self, topic: str) -> str | None:
        """The id of a topic; None for a system topic."""
        return self._ids.get(topic)

    def created_at(self, topic: str) -> int:
        """Physical offset at which the log ended when a topic was created; 0 if unknown."""
        return self._created_at.get(topic, 0)

    def created(self, topics: Iterable[str]) -> None:
        """Give ids to new topics."""
        log_end = self._log_end()
        for topic in topics:
            self._created_at[topic] = 0 if topic in self._lost else log_end
            self._ids[topic] = _new_id(self._created_at[topic])
            self._lost.discard(topic)
        self.saved.changed()

    def assign(self, topic: str, incarnation: str) -> None:
        """Give a new topic an id that other brokers know."""
        self._ids[topic] = incarnation
        self._created_at[topic] = self._log_end()
        self.saved.changed()

    def deleted(self, topic: str) -> None:
        """Remove the id of a deleted topic."""
        self._ids.pop(topic, None)
        self._created_at.pop(topic, None)
        self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        ids = dict(self._ids)
        return lambda: msgspec.json.encode(ids)


def _new_id(log_end: int) -> str:
    return f"{log_end:x}-{secrets.token_hex(_RANDOM_BYTES)}"


def _log_end_in(name: str) -> int:
    """Physical offset in an id; 0 for an id of another maker."""
    found = _LOG_END.match(name)
    return int(found[1], 16) if found else 0
