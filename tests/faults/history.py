"""Messages sent, acknowledged and read under faults, as rows of files; and their rules.

A message says who it is in its body, whose other bytes follow from that. So whoever reads one knows
whether it is whole, and the rows need no bodies.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# One message at its place in a queue. reader: which consumer, or at which attempt; time_ns: of the
# monotonic clock, which all processes of a machine share.
ROW = np.dtype(
    [
        ("time_ns", "i8"),
        ("reader", "i8"),
        ("queue", "i8"),
        ("offset", "i8"),
        ("producer", "i8"),
        ("lane", "i8"),
        ("number", "i8"),
    ]
)
LANES = 8
# The largest is compressed by the client.
_BODY_BYTES = (32, 100, 100, 300, 1000, 6000)


class HistoryBroken(Exception):
    """A promise that was not kept."""


class Identity(NamedTuple):
    """The ``number``-th message of one key of one producer."""

    producer: int
    lane: int
    number: int

    @property
    def key(self) -> str:
        return f"{self.producer}-{self.lane}"

    def body(self) -> bytes:
        head = b"%d/%d/%d|" % self
        filler = hashlib.sha256(head).digest()
        return head + filler * (_BODY_BYTES[filler[0] % len(_BODY_BYTES)] // len(filler))


def identify(body: bytes) -> Identity:
    """Whose body it is. Raises HistoryBroken when a byte of it is not as it was sent."""
    head, _, _ = body.partition(b"|")
    try:
        identity = Identity(*map(int, head.split(b"/")))
    except (TypeError, ValueError):
        raise HistoryBroken(f"nobody sent the body {body[:60]!r}") from None
    if body != identity.body():
        raise HistoryBroken(f"the body of {identity} is damaged: {body[:60]!r}")
    return identity


# -- files -----------------------------------------------------------------------------------------


class Recorder:
    """Appends rows to a file; what it took is there even if this process is killed."""

    def __init__(self, path: Path, reader: int = 0) -> None:
        self._path = path
        self._reader = reader

    def add(self, places: Iterable[tuple[int, int, Identity]]) -> None:
        """places: queue, offset and message."""
        now = time.monotonic_ns()
        rows = [(now, self._reader, queue, offset, *message) for queue, offset, message in places]
        with self._path.open("ab") as file:
            file.write(np.array(rows, ROW).tobytes())


def row_count(path: Path) -> int:
    """Rows in a file that may be growing."""
    return path.stat().st_size // ROW.itemsize if path.exists() else 0


def rows(*paths: Path) -> np.ndarray:
    """All rows of files, one file after the other."""
    return np.concatenate([np.fromfile(path, ROW, row_count(path)) for path in paths])


# -- promises --------------------------------------------------------------------------------------


class Totals(NamedTuple):
    """The totals of a history that is as it should be.

    unacknowledged: stored although the sender heard nothing of it. stored_twice: by a sender that
    tried again. read_again: deliveries of what the group had been given before.
    """

    acknowledged: int
    stored: int
    unacknowledged: int
    stored_twice: int
    read_again: int

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} messages acknowledged, 0 of them lost; {self.stored} stored, "
            f"{self.unacknowledged} of them without an acknowledgement and {self.stored_twice} "
            f"more than once; {self.read_again} read again"
        )


def check(
    acknowledged: np.ndarray, stored: np.ndarray, read: np.ndarray, sent: dict[tuple[int, int], int]
) -> Totals:
    """Hold a history to all promises. Raises HistoryBroken.

    acknowledged: rows of the producers. stored: rows of one who read the queues at the end.
    read: rows of a group whose members take its queues in order.
    sent: how many messages each key (producer, lane) began to send.
    """
    _check_whole(stored)
    stored = stored[np.argsort(_place(stored))]
    _check_same(acknowledged, stored, "acknowledged, and lost")
    _check_same(read, stored, "read by the group, and not in the queue")
    _check_all_read(read, stored)
    _check_sent(stored, sent)
    _check_keys_in_order(acknowledged)
    _check_read_in_order(read)
    identities = np.unique(_identity(stored))
    answered = np.unique(_identity(acknowledged))
    return Totals(
        acknowledged=len(answered),
        stored=len(stored),
        unacknowledged=len(identities) - len(answered),
        stored_twice=len(stored) - len(identities),
        read_again=len(read) - len(np.unique(_place(read))),
    )


def _place(rows: np.ndarray) -> np.ndarray:
    place: np.ndarray = rows["queue"] << 48 | rows["offset"]
    return place


def _identity(rows: np.ndarray) -> np.ndarray:
    identity: np.ndarray = rows["producer"] << 56 | rows["lane"] << 48 | rows["number"]
    return identity


def _fail(problem: str, rows: np.ndarray) -> None:
    """Raise HistoryBroken if there are rows that show the problem."""
    if len(rows):
        shown = [dict(zip(rows.dtype.names or (), row.item(), strict=True)) for row in rows[:3]]
        raise HistoryBroken(f"{len(rows)} messages {problem}: {shown}")


def _check_whole(stored: np.ndarray) -> None:
    """Each queue holds every offset from 0 on once, as its reader got them."""
    for queue in np.unique(stored["queue"]):
        offsets = stored["offset"][stored["queue"] == queue]
        if not np.array_equal(offsets, np.arange(len(offsets))):
            raise HistoryBroken(f"queue {queue} was read at offsets {offsets}")


def _check_same(rows: np.ndarray, stored: np.ndarray, problem: str) -> None:
    """Check that the rows name what lies at their offsets in the log."""
    at = np.searchsorted(_place(stored), _place(rows))
    is_there = at < len(stored)
    same = _place(stored)[at[is_there]] == _place(rows)[is_there]
    same &= _identity(stored)[at[is_there]] == _identity(rows)[is_there]
    is_there[is_there] = same
    _fail(problem, rows[~is_there])


def _check_all_read(read: np.ndarray, stored: np.ndarray) -> None:
    _fail("stored, and never read", stored[~np.isin(_place(stored), _place(read))])


def _check_sent(stored: np.ndarray, sent: dict[tuple[int, int], int]) -> None:
    for (producer, lane), count in sent.items():
        ours = stored[(stored["producer"] == producer) & (stored["lane"] == lane)]
        _fail("stored, and never sent", ours[ours["number"] >= count])
    keys = set(np.unique(stored[["producer", "lane"]]).tolist())
    if keys - sent.keys():
        raise HistoryBroken(f"stored, and never sent: {sorted(keys - sent.keys())}")


def _check_keys_in_order(acknowledged: np.ndarray) -> None:
    """A key's messages lie in one queue in the order in which they were sent."""
    rows = acknowledged[np.argsort(_identity(acknowledged), kind="stable")]
    same_key = (np.diff(rows["producer"]) == 0) & (np.diff(rows["lane"]) == 0)
    _fail("out of order", rows[1:][same_key & (np.diff(_place(rows)) <= 0)])


def _check_read_in_order(read: np.ndarray) -> None:
    """Check that the group is first given each queue in the queue's order."""
    rows = read[np.argsort(read["time_ns"], kind="stable")]
    _, first = np.unique(_place(rows), return_index=True)
    rows = rows[np.sort(first)]
    rows = rows[np.argsort(rows["queue"], kind="stable")]
    same_queue = np.diff(rows["queue"]) == 0
    _fail("read out of order", rows[1:][same_queue & (np.diff(rows["offset"]) <= 0)])
