"""Which of the topics that had a name one after the other a topic is.

Readers that keep offsets would otherwise take a topic that was deleted and made anew for the one
they knew. config/topicIncarnation.json is a file of our own beside topics.json, which Apache's
brokers neither read nor write.

Source: docs/protocol.md "Topics"; tests/broker/test_incarnations.py.
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
_PLACE = re.compile(r"([0-9a-f]{1,16})-")
_decoder = msgspec.json.Decoder(dict[str, str])


class Incarnations:
    """An id for each topic, made with it: where the log ended then, and random digits.

    The place in the log is 0 of topics that were there before this file.

    saved: the file, which follows the table. An id that was told to somebody must be on disk.
    """

    def __init__(self, file: ConfigFile, topics: Iterable[str], log_end: Callable[[], int]) -> None:
        """topics: all there are. Raises StoreFormatError when what is there can't be read."""
        self._log_end = log_end
        self.saved = SavedFile(file, self._snapshot)
        known = load_table(file, _decoder.decode) or {}
        self._ids = {topic: known.get(topic) or _new_id(0) for topic in topics}
        # A power cut may have taken the end of the log: what comes now lies behind the topic.
        end = log_end()
        self._made_at = {topic: min(_place_in(name), end) for topic, name in self._ids.items()}
        if self._ids != known:
            self.saved.changed()

    def of(self, topic: str) -> str | None:
        """The id of a topic; None for those that are always there."""
        return self._ids.get(topic)

    def made_at(self, topic: str) -> int:
        """Physical offset at which the log ended when a topic was made; 0 if that is not known."""
        return self._made_at.get(topic, 0)

    def made(self, topics: Iterable[str]) -> None:
        """There are new topics."""
        made_at = self._log_end()
        for topic in topics:
            self._ids[topic] = _new_id(made_at)
            self._made_at[topic] = made_at
        self.saved.changed()

    def gone(self, topic: str) -> None:
        """A topic was deleted."""
        self._ids.pop(topic, None)
        self._made_at.pop(topic, None)
        self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        ids = dict(self._ids)
        return lambda: msgspec.json.encode(ids)


def _new_id(made_at: int) -> str:
    return f"{made_at:x}-{secrets.token_hex(_RANDOM_BYTES)}"


def _place_in(name: str) -> int:
    """The place in the log that an id has; ids of other makers have none."""
    place = _PLACE.match(name)
    return int(place[1], 16) if place else 0
