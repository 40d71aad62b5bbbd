"""Metrics of tiered storage."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.metrics import table
from headrace_broker.metrics.table import PAIRS_MAX, TOPICS_MAX
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace_broker.tiered.access.status import Behind, TierState
    from headrace_daemon.metrics.samples import Metric, Samples

_STORAGE = "tiered", "blob"
# The peer counts consume queues as well: the same messages once more.
_FILE_TYPE = "commit_log"


class TierMetrics:
    """Collects the operations of a tier's drivers, its uploads and its reads."""

    def __init__(self, state: TierState) -> None:
        self._state = state

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        state = self._state
        operations, reader = state.access.drivers.operations, state.reader
        for (operation, is_success), latencies in list(operations.latencies_ms.items()):
            labels = operation, str(is_success).lower()
            samples.add_histogram(table.TIER_LATENCY, latencies, *labels)
        samples.add_histogram(table.TIER_UPLOAD_BYTES, operations.uploaded)
        samples.add_histogram(table.TIER_DOWNLOAD_BYTES, operations.downloaded)
        samples.add(table.TIER_GIVEN_UP, len(state.given_up()))
        samples.add(table.TIER_FAILING, state.following.problem_seconds)
        samples.add(table.TIER_CACHE_COUNT, reader.blocks.message_count)
        samples.add(table.TIER_CACHE_BYTES, reader.blocks.byte_count)
        samples.add(table.TIER_CACHE_ACCESS, reader.blocks.access_count)
        samples.add(table.TIER_CACHE_HIT, reader.blocks.hit_count)
        _add_by_topic(samples, table.TIER_MESSAGES_UPLOADED, state.upload.message_counts)
        _add_by_topic(samples, table.TIER_MESSAGES_OUT, reader.message_counts)
        await take_break()
        await self._add_queues(samples)

    async def _add_queues(self, samples: Samples) -> None:
        queue_count = stored_bytes = 0
        for queues in self._state.behind():
            for behind in queues:
                queue_count += 1
                stored_bytes += self._state.stored_bytes(behind.queue)
                if queue_count <= PAIRS_MAX:
                    await self._add_behind(samples, behind)
            await take_break()
        samples.add(table.OMITTED, max(queue_count - PAIRS_MAX, 0), "tiered queues")
        samples.add(table.STORAGE_SIZE, stored_bytes, *_STORAGE)

    async def _add_behind(self, samples: Samples, behind: Behind) -> None:
        labels = behind.queue.topic, str(behind.queue.queue_id), _FILE_TYPE
        samples.add(table.TIER_BEHIND, behind.message_count, *labels)
        read = partial(self._state.age_ms, behind)
        age_ms = await samples.read(read, None) if behind.message_count else 0
        if age_ms is not None:
            samples.add(table.TIER_BEHIND_MS, age_ms, *labels)


def _add_by_topic(samples: Samples, metric: Metric, counts: Mapping[str, int]) -> None:
    for topic, count in list(counts.items())[:TOPICS_MAX]:
        samples.add(metric, count, topic)
