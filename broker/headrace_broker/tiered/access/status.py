"""TIER_STATUS: the progress of uploads, and what holds them up.

Source: docs/protocol.md "Tier status"; tests/broker/tiered/test_tiered_status.py.
"""

from __future__ import annotations

import heapq
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace_protocol import fastjson
from headrace_protocol.bounds import ITEMS_MAX
from headrace_protocol.codes import RequestCode
from headrace_protocol.errors import NotReady
from headrace_protocol.rights.late import SEE
from headrace_protocol.rights.rules import Kind
from headrace_protocol.serving import Reply
from headrace_protocol.tier_bodies import TierQueueStatus
from headrace_protocol.tier_headers import TierStatusHeader
from headrace_protocol.waiting import ready, take_break

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_broker.store.followers.following import Following
    from headrace_broker.store.message_store import MessageStore
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.tiered.access.settings import TierSettings
    from headrace_broker.tiered.access.standings import GivenUp
    from headrace_broker.tiered.access.tier_access import TierAccess
    from headrace_broker.tiered.access.tier_reader import TierReader
    from headrace_broker.tiered.access.upload import Upload
    from headrace_broker.topics.table import TopicTable
    from headrace_protocol.serving import Registry, Request


class Behind(NamedTuple):
    """The messages of a queue that are still to be uploaded: from ``first`` to ``end``."""

    queue: StoreQueue
    first: int
    end: int

    @property
    def message_count(self) -> int:
        """Number of messages."""
        return self.end - self.first


class TierState:
    """The messages that are uploaded and read, and those that are still to be uploaded.

    following: runs the upload; set once, before any request.
    """

    following: Following

    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        settings: TierSettings,
        access: TierAccess,
        reader: TierReader,
        upload: Upload,
    ) -> None:
        self._store = store
        self._topics = topics
        self._settings = settings
        self.access = access
        self.reader = reader
        self.upload = upload

    def stored_bytes(self, queue: StoreQueue) -> int:
        """Bytes of a queue in the tier; 0 before that is open."""
        tiered = self.access.queue(queue.topic, queue.queue_id)
        return 0 if tiered is None else tiered.stored_bytes

    def behind(self, topic: str | None = None) -> Iterator[list[Behind]]:
        """The queues with messages, topic by topic; of one topic or of all that are tiered."""
        wanted = list(self._topics.all()) if topic is None else [self._topics.expect(topic)]
        for config in wanted:
            name = config.topic_name
            queues = self._store.queues_of(name) if self.upload.wants(name) else []
            found = [self._behind(queue) for queue in queues]
            yield [behind for behind in found if behind.end]

    def _behind(self, queue: StoreQueue) -> Behind:
        name = queue.topic, queue.queue_id
        low, end = self._store.source(queue).known_range()
        if self.access.is_open:
            tiered = self.access.queue(*name)
            uploaded = 0 if tiered is None else tiered.commit_offset
        else:
            uploaded = self.following.synced_offset(name) or 0
        return Behind(queue, min(max(uploaded, low), end), end)

    def behind_bytes(self, topic: str) -> int:
        """Bytes of a topic's records to be uploaded, without those that must be read first."""
        byte_count = 0
        for behind in next(self.behind(topic)):
            with suppress(NotReady):
                byte_count += self._store.source(behind.queue).record_bytes(behind.first)
        return byte_count

    def age_ms(self, behind: Behind) -> int:
        """Age of the oldest message to be uploaded, 0 without one. Raises NotReady."""
        store_ms = self._store.source(behind.queue).store_time_at(behind.first)
        return 0 if store_ms is None else max(self.access.now_ms() - store_ms, 0)

    def of_queue(self, behind: Behind) -> TierQueueStatus:
        """The state of a queue. Raises NotReady."""
        queue = behind.queue
        name, source = (queue.topic, queue.queue_id), self._store.source(queue)
        low, end = source.known_range()
        status = TierQueueStatus(
            topic=queue.topic,
            queue_id=queue.queue_id,
            local_min=low,
            local_max=end,
        )
        if (given_up := self.upload.standings.given_up.get(name)) is not None:
            status.problem, status.problem_since_ms = given_up.reason, given_up.since_ms
            status.foreign_from = given_up.foreign_from
        tiered = self.access.queue(*name)
        if tiered is not None:
            status.tier_min, status.tier_end = tiered.min_offset, tiered.commit_offset
            status.tier_bytes = tiered.log_bytes
        if behind.message_count:
            status.behind_messages = behind.message_count
            status.behind_bytes = source.record_bytes(behind.first)
            status.behind_seconds = self.age_ms(behind) / 1000
        return status

    def given_up(self) -> dict[tuple[str, int], GivenUp]:
        """The queues that are not uploaded until somebody acts. From any thread."""
        return dict(self.upload.standings.given_up)

    def of_broker(self) -> dict[str, object]:
        """The fields of ``TierStatus`` that are not about single queues."""
        breaker, upload = self.reader.breaker, self.following.status()
        drivers, standings = self.access.drivers, self.upload.standings
        return {
            "level": self._settings.level.name,
            "isOpen": self.access.is_open,
            "placeProblem": drivers.problem,
            "placeProblemSeconds": drivers.problem_seconds,
            "uploadProblem": upload.problem,
            "uploadProblemSeconds": upload.problem_seconds,
            "readProblem": breaker.problem,
            "isReadPaused": breaker.is_paused,
            "givenUpCount": len(standings.given_up),
            "foreignCount": standings.foreign_count(),
        }


class TierStatusRequests:
    """Serves TIER_STATUS."""

    def __init__(self, state: TierState) -> None:
        self._state = state

    def register(self, registry: Registry) -> None:
        """Route the request."""
        registry.route_long(RequestCode.TIER_STATUS, self.status)

    async def status(self, request: Request) -> Reply:
        """The queues that are furthest behind, and how many there are."""
        header, state = request.header(TierStatusHeader), self._state
        count_max = min(max(header.max_num, 0), ITEMS_MAX)
        furthest: list[tuple[int, int, Behind]] = []
        queue_count = 0
        for queues in state.behind(header.topic):
            for behind in queues:
                if not request.may(Kind.TOPIC, behind.queue.topic, *SEE):
                    break
                queue_count += 1
                # Later queues of the same count come later.
                heapq.heappush(furthest, (behind.message_count, -queue_count, behind))
                if len(furthest) > count_max:
                    heapq.heappop(furthest)
            await take_break()
        furthest.sort(reverse=True)
        found = [await ready(partial(state.of_queue, behind)) for _, _, behind in furthest]
        written = await fastjson.dumps_list_sliced(found)
        body = {**state.of_broker(), "queueCount": queue_count, "queues": written}
        return Reply(body=fastjson.dumps_parts(body))
