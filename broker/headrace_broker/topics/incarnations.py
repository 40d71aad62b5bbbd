"""Per-topic ids that tell a recreated topic from its predecessor.

Without them, readers that keep offsets would mistake a recreated topic for the old one. The file,
config/topicIncarnation.json, is headrace's own; Apache's brokers neither read nor write it.

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
    """The id of each topic, created with the topic.

    saved: the table's file. An id must be on disk before a client sees it.
    """

    def __init__(self, file: ConfigFile, topics: Iterable[str]) -> None:
        """topics: all that exist. Raises StoreFormatError if the file can't be read."""
        self.saved = SavedFile(file, self._snapshot)
        known = load_table(file, _decoder.decode) or {}
        self._ids = {topic: known.get(topic) or _new_id() for topic in topics}
        if self._ids != known:
            self.saved.changed()

    def of(self, topic: str) -> str | None:
        """The id of a topic; None for a system topic."""
        return self._ids.get(topic)

    def created(self, topics: Iterable[str]) -> None:
        """Give ids to new topics."""
        self._ids.update((topic, _new_id()) for topic in topics)
        self.saved.changed()

    def deleted(self, topic: str) -> None:
        """Remove the id of a deleted topic."""
        self._ids.pop(topic, None)
        self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        ids = dict(self._ids)
        return lambda: msgspec.json.encode(ids)


def _new_id() -> str:
    return secrets.token_hex(_ID_BYTES)
