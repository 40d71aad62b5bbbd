"""A property that has a message stored in another topic."""

from __future__ import annotations

from headrace_broker.message_demands import Demand, SentMessage

PROPERTY = "PARK"


class ParkingTopic:
    """Messages with PARK go to queue 0 of it."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def demand(self) -> Demand:
        return Demand("parked messages", (PROPERTY,), apply=self._park)

    def _park(self, message: SentMessage) -> None:
        message.topic, message.queue_id = self._topic, 0
