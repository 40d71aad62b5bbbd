"""Lives of topics in the tier: a topic that is recreated is another one of its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from headrace_broker.store.files.config_file import ConfigFile

LIVES_FILE: Final = "tieredTopicIncarnation.json"
# Begins the ids of topics whose id was lost, or that have queues since before they were made.
_LOST: Final = "0-"
_decoder = msgspec.json.Decoder(dict[str, str])


class Lives:
    """The incarnation id of each topic that the tier has, noted before its first queue is made.

    Of other topics, such as those that Apache's broker uploaded, only the messages themselves tell
    whether they are the broker's.
    """

    def __init__(
        self,
        file: ConfigFile,
        incarnation: Callable[[str], str | None],
        has_queues: Callable[[str], bool],
    ) -> None:
        """incarnation: the id of a topic, None if it does not exist.

        has_queues: whether the local store has queues of a topic.

        Raises StoreFormatError, OSError.
        """
        self._file = file
        self._incarnation = incarnation
        self._has_queues = has_queues
        self._ids = file.read(_decoder.decode) or {}

    def is_current(self, topic: str) -> bool:
        """True if the tier is known to have the topic's present life."""
        known = self._ids.get(topic)
        return known is not None and known == self._incarnation(topic)

    def current(self, topics: Iterable[str]) -> dict[str, str]:
        """The ids of those topics of which the tier is known to have the present life."""
        return {topic: self._ids[topic] for topic in topics if self.is_current(topic)}

    def is_over(self, topic: str) -> bool:
        """True if the tier is known to have an earlier life of the topic."""
        known, now = self._ids.get(topic), self._incarnation(topic)
        if known is None or known == now:
            return False
        # A table of topics that was lost deletes nothing: the queues are still there.
        return not self._has_queues(topic) if now is None else not now.startswith(_LOST)

    def over(self) -> set[str]:
        """All topics of which the tier has an earlier life."""
        return {topic for topic in self._ids if self.is_over(topic)}

    def note(self, topic: str) -> None:
        """The tier has the present life, or nothing of the topic. Raises OSError."""
        incarnation = self._incarnation(topic)
        if incarnation is not None:
            self._save({**self._ids, topic: incarnation})

    def forget(self, topics: Iterable[str]) -> None:
        """Forget what the tier has of topics. Raises OSError."""
        left = {topic: known for topic, known in self._ids.items() if topic not in {*topics}}
        if left != self._ids:
            self._save(left)

    def _save(self, ids: dict[str, str]) -> None:
        self._file.save(msgspec.json.encode(ids))
        self._ids = ids
