"""Headers of requests about tiered storage."""

from __future__ import annotations

from headrace_protocol.headers import Int32, Int64, RequestHeader


class TierStatusHeader(RequestHeader, kw_only=True, gc=False):
    """TIER_STATUS. topic: None for all."""

    topic: str | None = None
    max_num: Int32


class TierResumeHeader(RequestHeader, kw_only=True, gc=False):
    """TIER_RESUME. topic: None for all."""

    topic: str | None = None


class TierForgetHeader(RequestHeader, kw_only=True, gc=False):
    """TIER_FORGET. from_offset: the tier's messages from there on are forgotten."""

    topic: str
    queue_id: Int32
    from_offset: Int64


class TierPlanHeader(RequestHeader, kw_only=True, gc=False):
    """TIER_PLAN. start_offset, end_offset: queue offsets, ``end_offset`` not included."""

    topic: str
    queue_id: Int32
    start_offset: Int64
    end_offset: Int64
