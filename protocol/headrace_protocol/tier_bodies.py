"""Bodies about tiered storage."""

from __future__ import annotations

import msgspec

from headrace_protocol.bodies import Body
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations


class TierQueueStatus(Body):
    """A queue of a tiered topic.

    local_min, local_max: queue offsets of the log, ``local_max`` not included. tier_min, tier_end:
    those of the tier; None if it has none, or could not be reached since the start. tier_bytes: of
    its records there. behind_messages, behind_bytes: still to be uploaded; behind_seconds: age of
    the oldest of these. problem: why the queue is given up, since problem_since_ms; ``tier resume``
    or a restart tries again. foreign_from: where the tier has other messages than the log, until
    ``tier forget``; None if it has the same.
    """

    topic: str = ""
    queue_id: Int32 = 0
    local_min: Int64 = 0
    local_max: Int64 = 0
    tier_min: Int64 | None = None
    tier_end: Int64 | None = None
    tier_bytes: Int64 = 0
    behind_messages: Int64 = 0
    behind_bytes: Int64 = 0
    behind_seconds: float = 0.0
    problem: str = ""
    problem_since_ms: Int64 = 0
    foreign_from: Int64 | None = None


class TierStatus(Body):
    """The answer to TIER_STATUS: a broker's tier, and the queues that are furthest behind.

    is_open: whether the tier was reached since the start. place_problem: why the place is not that
    of this tier, or can't be reached, for place_problem_seconds; "" if the last look found it.
    upload_problem, read_problem: why the last upload or read failed; "" if it succeeded.
    upload_problem_seconds: how long uploads have failed; they are retried. is_read_paused: whether
    reads are rejected at once after repeated failures. given_up_count: queues that are not
    uploaded, of which in foreign_count the tier has other messages than the log. queue_count:
    queues with messages, of which ``queues`` has the first ones.
    """

    level: str = ""
    is_open: bool = False
    place_problem: str = ""
    place_problem_seconds: float = 0.0
    upload_problem: str = ""
    upload_problem_seconds: float = 0.0
    read_problem: str = ""
    is_read_paused: bool = False
    given_up_count: Int64 = 0
    foreign_count: Int64 = 0
    queue_count: Int64 = 0
    queues: list[TierQueueStatus] = msgspec.field(default_factory=list)


class UnitSpan(msgspec.Struct, frozen=True, rename="camel"):
    """Units of messages with consecutive queue offsets, back to back in a file or object.

    path: below the place of the tier. first, count: queue offsets. position: of the first unit in
    the file. log_base: place of the first message in the queue's log, -1 if only the unit tells.
    begin_ms, end_ms: lowest and highest store time.
    """

    path: str
    first: Int64
    count: Int64
    position: Int64
    log_base: Int64
    begin_ms: Int64
    end_ms: Int64

    @property
    def end(self) -> int:
        """One past the last queue offset."""
        return self.first + self.count


class LogSpan(msgspec.Struct, frozen=True, rename="camel"):
    """Bytes of a queue's log in a file or object.

    path: as in ``UnitSpan``. base, size: in the log. position: of the first byte in the file.
    """

    path: str
    base: Int64
    size: Int64
    position: Int64

    @property
    def end(self) -> int:
        """One past the last byte in the log."""
        return self.base + self.size


class TierPlan(Body):
    """The answer to TIER_PLAN: where a tier keeps the messages of a range.

    url: of the place: a folder (``file:``), or a bucket with the prefix of all paths. endpoint,
    region: of the bucket; "" for those of the provider. next_offset: the range was looked at up to
    there. units, log: in order; messages of the range that are in no span are not in the tier.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""
    next_offset: Int64 = 0
    units: list[UnitSpan] = msgspec.field(default_factory=list)
    log: list[LogSpan] = msgspec.field(default_factory=list)
