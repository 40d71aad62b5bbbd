"""Which of the topics that had a name one after the other a topic is.

Readers that keep offsets would otherwise take a topic that was deleted and made anew for the one
they knew. config/topicIncarnation.json is a file of our own beside topics.json, which Apache's
brokers neither read nor write.

Source: docs/protocol.md "Topics"; tests/broker/test_incarnations.py.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from headrace_broker.persistence import SavedFile, load_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.files.config_file import ConfigFile

_ID_BYTES = 8
_decoder = msgspec.json.Decoder(dict[str, str])


class Incarnations:
    """An id for each topic, made with it.

    saved: the file, which follows the table. An id that was told to somebody must be on disk.
    """

    def __init__(self, file: ConfigFile, topics: Iterable[str]) -> None:
        """topics: all there are. Raises StoreFormatError when what is there can't be read."""
        self.saved = SavedFile(file, self._snapshot)
        known = load_table(file, _decoder.decode) or {}
        self._ids = {topic: known.get(topic) or _new_id() for topic in topics}
        if self._ids != known:
            self.saved.changed()

    def of(self, topic: str) -> str | None:
        """The id of a topic; None for those that are always there."""
        return self._ids.get(topic)

    def made(self, topics: Iterable[str]) -> None:
        """There are new topics."""
        self._ids.update((topic, _new_id()) for topic in topics)
        self.saved.changed()

    def gone(self, topic: str) -> None:
        """A topic was deleted."""
        self._ids.pop(topic, None)
        self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        ids = dict(self._ids)
        return lambda: msgspec.json.encode(ids)


def _new_id() -> str:
    return secrets.token_hex(_ID_BYTES)
