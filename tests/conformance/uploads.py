"""Waits for a broker's tier."""

from __future__ import annotations

from headrace.blocking import Admin
from tests.support.until import wait_until


def wait_until_uploaded(nameserver: str, topic: str, limit_s: float) -> None:
    """Until the tier has everything, and the log the end only."""
    with Admin(nameserver=nameserver) as admin:

        def is_uploaded() -> bool:
            (tier,) = admin.tier_status(topic).values()
            return bool(tier.queues) and all(
                queue.local_min and not queue.behind_messages for queue in tier.queues
            )

        wait_until(is_uploaded, lambda: admin.tier_status(topic), limit_s)
