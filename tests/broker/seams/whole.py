"""A whole feature: a drawer, which keeps the messages of a topic that say so.

A message with DRAWER is put into the drawer's own topic. A service finds it there, says so in the
runtime info and on the metrics page, and a table counts it. What is in the drawer is found by its
key, stays in the log, and keeps its topic from being deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import trio

from headrace_broker.consumer.unconsumed import InnerConsumer
from headrace_broker.feature import Feature, Followed
from headrace_broker.message_demands import Demand
from headrace_broker.persistence import SavedFile
from headrace_broker.store.recovery import NOTHING, Scan
from headrace_broker.store.store_source import EmptySource
from headrace_daemon.metrics.samples import Metric
from headrace_daemon.services import Service
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply
from headrace_protocol.waiting import take_break
from tests.support.followers import CopyingFollower

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace_broker.core import Core
    from headrace_broker.message_demands import SentMessage
    from headrace_broker.queue_directory import Elsewhere, Lookup, QueueDirectory, Source
    from headrace_broker.store.followers.following import Following
    from headrace_broker.store.reader import WantedMessages
    from headrace_broker.store.retention.disk_forecast import LowestUnconsumed
    from headrace_broker.store.store_queue import StoreQueue
    from headrace_broker.topics.rules import Then
    from headrace_daemon.metrics.samples import Samples
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.columns import RecordColumns
    from headrace_protocol.message import Buffer
    from headrace_protocol.serving import Registry, Request

PROPERTY: Final = "DRAWER"
DRAWER: Final = "Drawer"
LOCKED: Final = "the drawer is locked"
# A request that no broker of headrace serves.
LOOK_INTO: Final = RequestCode.EXCHANGE_BROKER_HA_INFO
IN_DRAWER: Final = Metric("feature_in_drawer", "gauge", "Messages in the drawer")
_POLL_S: Final = 0.01


class Drawer:
    """used: the fields of the record that the broker has used so far."""

    def __init__(self, core: Core) -> None:
        self.used: set[str] = set()
        self.is_locked = False
        self.core = core
        self._store = core.store
        self.count = 0
        self._saved = SavedFile(core.file("drawer.json"), lambda: str(self.count).encode)
        folder = core.config.store_path_root_dir / "drawer"
        self.copies = CopyingFollower(folder, core.store.fs, (DRAWER,))

    def record(self) -> Feature:
        return Feature(
            places=(self._place,),
            sources=(self._source,),
            key_sources=(self,),
            scans=(Scan(self._scan_from, self._scan),),
            followers=(Followed(self.copies, self._follow),),
            inner_consumers=(InnerConsumer(DRAWER, "the drawer", self._next_offset),),
            unconsumed=(self._unconsumed,),
            demands=(Demand("messages for the drawer", (PROPERTY,), apply=self._put),),
            targets=(self._target,),
            staged_bytes=(self._staged_bytes,),
            turn_ends=(self._end_turn,),
            topic_rules=(self,),
            moves=(self,),
            before_registration=(self._before_registration,),
            guards=(self._add_guard,),
            processors=(self,),
            tables=(self._saved,),
            services=(Service(self._run),),
            collectors=(self._collect,),
            runtime_info=(self._info,),
        )

    # -- the start ---------------------------------------------------------------------------------

    def _scan_from(self) -> int:
        self.used.add("scans")
        return NOTHING

    def _scan(self, _records: RecordColumns) -> None:
        pytest.fail("nothing was asked for")

    # -- queues ------------------------------------------------------------------------------------

    def _place(self, _directory: QueueDirectory, _lookup: Lookup) -> Elsewhere | None:
        self.used.add("places")
        return None

    def _source(self, lookup: Lookup, _queue: StoreQueue) -> Source | None:
        self.used.add("sources")
        return EmptySource() if self.is_locked and lookup.topic.topic_name == DRAWER else None

    async def find(self, wanted: WantedMessages) -> list[Buffer]:
        self.used.add("key_sources")
        await take_break()
        found = self._store.source(self._store.queue(DRAWER, 0)).get(0, 1, 1 << 20, None)
        return [bytes(b"".join(found.buffers))] if wanted.key == DRAWER else []

    def has_foreign_ids(self, _topic: str) -> bool:
        return False

    def _follow(self, _following: Following) -> None:
        self.used.add("followers")

    def _next_offset(self, _queue_id: int) -> int:
        self.used.add("inner_consumers")
        return 0

    def _unconsumed(self, lowest: LowestUnconsumed) -> LowestUnconsumed:
        self.used.add("unconsumed")
        return lowest

    # -- messages ----------------------------------------------------------------------------------

    def _put(self, message: SentMessage) -> None:
        self.used.add("demands")
        message.topic, message.queue_id = DRAWER, 0

    def _target(self, _topic: str, queue_id: int) -> int:
        self.used.add("targets")
        return queue_id

    def _staged_bytes(self, _query_id: str) -> int:
        self.used.add("staged_bytes")
        return 0

    def _end_turn(self) -> bool:
        self.used.add("turn_ends")
        return False

    # -- changes of topics -------------------------------------------------------------------------

    def check_plain_change(self, _topic: str, _new: TopicConfig | None) -> None:
        self.used.add("topic_rules")

    async def before_delete(self, topic: str) -> None:
        await take_break()
        if topic == DRAWER:
            raise RequestError(ResponseCode.NO_PERMISSION, LOCKED)

    def after_delete(self, _topic: str, then: Then) -> None:
        then(None)

    def settle(self, _topic: str, _queue_ids: Iterable[int], then: Then) -> None:
        then(None)

    def moved(self, _topic: str, _queue_ids: Iterable[int]) -> None:
        self.used.add("moves")

    # -- requests ----------------------------------------------------------------------------------

    async def _before_registration(self, _nameserver: str) -> None:
        self.used.add("before_registration")

    def _add_guard(self, registry: Registry) -> None:
        self.used.add("guards")
        registry.guard(self._refuse, (LOOK_INTO,))

    def _refuse(self, _request: Request) -> Reply | None:
        return Reply(code=ResponseCode.NO_PERMISSION, remark=LOCKED) if self.is_locked else None

    def register(self, registry: Registry) -> None:
        registry.route(LOOK_INTO, self._look_into)

    def _look_into(self, _request: Request) -> Reply:
        self.used.add("processors")
        return Reply(remark=str(self.count))

    # -- tasks and numbers -------------------------------------------------------------------------

    async def _run(self) -> None:
        self.used.add("services")
        while True:
            await trio.sleep(_POLL_S)
            count = self._store.queue(DRAWER, 0).next_offset
            if count != self.count:
                self.count = count
                self._saved.changed()

    async def _collect(self, samples: Samples) -> None:
        self.used.add("collectors")
        samples.add(IN_DRAWER, self.count)

    def _info(self) -> dict[str, str]:
        self.used.add("runtime_info")
        return {"inDrawer": str(self.count)}
