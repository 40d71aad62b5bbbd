"""Messages sent to the queues of tiered topics, and those that must be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.simulation.history import PromiseBroken

Name = tuple[str, int]


class Sent(NamedTuple):
    """A message; its queue offset is its place in the list. tags: "" for none."""

    body: bytes
    tags: str
    store_ms: int


class QueueModel:
    """The messages of a queue since its topic was made.

    flushed_count: so many are on disk, so no crash may take them. expired_ms: what was stored
    before this time may have expired.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.flushed_count = 0
        self.expired_ms = 0
        self.is_deleted = False

    def settle(self, name: Name, low: int, end: int) -> None:
        """Forget what a crash has taken. Raises PromiseBroken."""
        if end < self.flushed_count:
            raise PromiseBroken(f"{name} ends at {end}, and had {self.flushed_count} on disk")
        if end > len(self.sent):
            raise PromiseBroken(f"{name} ends at {end}, and had {len(self.sent)} at most")
        del self.sent[end:]
        self.check_begin(name, low)

    def check_begin(self, name: Name, low: int) -> None:
        """Check that what precedes a queue's least offset may have expired."""
        due = [at for at in range(low) if self.sent[at].store_ms >= self.expired_ms]
        if due:
            raise PromiseBroken(f"{name} begins at {low}, without {due}")

    def check(self, name: Name, found: Sequence[tuple[int, bytes]], low: int, end: int) -> None:
        """Compare the messages in a range with what was sent. Raises PromiseBroken."""
        wanted = [(at, sent.body) for at, sent in enumerate(self.sent[:end]) if at >= low]
        if list(found) != wanted:
            offsets, others = [at for at, _ in found], {*found} - {*wanted}
            raise PromiseBroken(
                f"{name}: read {offsets} from {low} to {end}; {len(others)} of them were not sent"
            )
