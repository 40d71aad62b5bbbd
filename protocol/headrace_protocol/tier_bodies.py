"""JSON bodies about tiered storage."""

from __future__ import annotations

import msgspec

from headrace_protocol.bodies import Body
from headrace_protocol.headers import Int32, Int64  # noqa: TC001 - msgspec reads annotations


class TierQueueStatus(Body):
    """A queue of a tiered topic.

    local_min, local_max: queue offsets of the log, ``local_max`` not included. tier_min, tier_end:
    those of the tier; None if it has none, or could not be reached since the start. tier_bytes: of
    its records there. behind_messages, behind_bytes: still to be uploaded; behind_seconds: age of
    the oldest of these. problem: why the queue is not uploaded.
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


class TierStatus(Body):
    """The answer to TIER_STATUS: a broker's tier, and the queues that are furthest behind.

    is_open: whether the tier was reached since the start. upload_problem, read_problem: why the
    last upload or read failed; "" if it succeeded. is_read_paused: whether reads are rejected at
    once after repeated failures. queue_count: queues with messages, of which ``queues`` has the
    first ones.
    """

    level: str = ""
    is_open: bool = False
    upload_problem: str = ""
    read_problem: str = ""
    is_read_paused: bool = False
    queue_count: Int64 = 0
    queues: list[TierQueueStatus] = msgspec.field(default_factory=list)
