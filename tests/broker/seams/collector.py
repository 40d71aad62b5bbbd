"""A metric of a feature."""

from __future__ import annotations

from headrace_broker.core import Core
from headrace_daemon.metrics.samples import Metric, Samples
from headrace_protocol.waiting import take_break

LETTERS = Metric("feature_letters", "gauge", "Letters of the name of a topic", ("topic",))


class TopicLetters:
    """Measures all topics."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def collect(self, samples: Samples) -> None:
        for topic in list(self.core.tables.topics.all()):
            samples.add(LETTERS, len(topic.topic_name), topic.topic_name)
            await take_break()
