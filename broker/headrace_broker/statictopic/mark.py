"""The mark of static topics, apart from their mapping: config/staticTopic.json.

Without it, a topic whose mapping is lost would be served as a plain one, from physical queues that
clients take for logic ones. The file is headrace's own.

Source: docs/store-format.md "staticTopic.json"; tests/broker/statictopic/test_static_table.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from headrace_broker.persistence import SavedFile, load_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from headrace_broker.store.files.config_file import ConfigFile

MARK_NAME: Final = "staticTopic.json"
_decoder = msgspec.json.Decoder(dict[str, str])


class StaticMarks:
    """The names of the static topics, with the incarnation id of each; see ``incarnations.py``."""

    def __init__(self, file: ConfigFile) -> None:
        """Raises StoreFormatError if neither the file nor its backup can be read."""
        self.saved = SavedFile(file, self._snapshot)
        self._ids: dict[str, str] = load_table(file, _decoder.decode) or {}

    def __contains__(self, topic: object) -> bool:
        return topic in self._ids

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def incarnation(self, topic: str) -> str | None:
        """The incarnation id of a static topic, equal on all its brokers."""
        return self._ids.get(topic)

    def add(self, topic: str, incarnation: str) -> None:
        """Mark a topic, unless it is marked."""
        self.add_all({topic: incarnation})

    def add_all(self, incarnations: Mapping[str, str]) -> None:
        """Mark topics, unless they are marked; incarnations: of each."""
        known = len(self._ids)
        self._ids = {**incarnations, **self._ids}
        if len(self._ids) > known:
            self.saved.changed()

    def remove(self, topic: str) -> None:
        """Remove the mark of a deleted topic."""
        if self._ids.pop(topic, None) is not None:
            self.saved.changed()

    def _snapshot(self) -> Callable[[], bytes]:
        ids = dict(self._ids)
        return lambda: msgspec.json.encode(ids)
