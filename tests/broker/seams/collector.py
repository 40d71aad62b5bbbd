"""A metric of a feature."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_broker.core import Core
from headrace_daemon.metrics.samples import Metric, Samples

LETTERS = Metric("feature_letters", "gauge", "Letters of the name of a topic", ("topic",))


class TopicLetters:
    """Measures all topics."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def collect(self, samples: Samples) -> Iterator[None]:
        for topic in list(self.core.tables.topics.all()):
            samples.add(LETTERS, len(topic.topic_name), topic.topic_name)
            yield
