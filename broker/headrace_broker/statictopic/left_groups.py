"""Groups whose progress is in an item that clean-up drops: they continue at the next item.

Their offset goes with the item. A group without one begins anew, by default at the end, and would
skip what it has not read.
Source: docs/static-topics.md "Clean-up"; tests/broker/statictopic/test_static_cleanup.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_broker.peers.callers import CLEANUP
from headrace_broker.peers.peers import Ask
from headrace_broker.statictopic.rows import item_ask
from headrace_protocol.bodies import GroupList
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.drivers.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_broker.consumer.offsets import ConsumerOffsets
    from headrace_broker.peers.peers import Peers
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.statictopic.mapping import MappingItem


class LeftGroups:
    """Moves groups from the first item of a chain to the next."""

    def __init__(self, broker_name: str, offsets: ConsumerOffsets, peers: Peers) -> None:
        self._broker_name = broker_name
        self._peers = peers
        self._offsets = offsets

    async def move(self, topic: str, items: Sequence[MappingItem]) -> bool:
        """Move the groups whose newest offset is in the first of the items.

        items: decided ones. Returns False if a broker that must be asked does not answer.
        """
        first, following, *_ = items
        try:
            for group in sorted(await self._groups(topic, first)):
                if await self._newest(group, topic, items) is first:
                    await self._commit(group, topic, following)
        except HeadraceError:
            return False
        return True

    async def _groups(self, topic: str, item: MappingItem) -> Sequence[str]:
        if item.bname == self._broker_name:
            return [*self._offsets.groups_of(topic)]
        code, fields = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": topic, "lo": "false"}
        answer = await self._peers.ask(CLEANUP, Ask(item.bname, code, fields))
        return answer.expect().decode(GroupList).group_list

    async def _newest(
        self, group: str, topic: str, items: Sequence[MappingItem]
    ) -> MappingItem | None:
        """The newest item that has an offset of a group."""
        for item in reversed(items):
            if item.bname == self._broker_name:
                if self._offsets.query(group, topic, item.queue_id) is not None:
                    return item
                continue
            answer = await self._ask_offset(RequestCode.QUERY_CONSUMER_OFFSET, group, topic, item)
            answer.expect(ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND)
            if answer.command.code == ResponseCode.SUCCESS:
                return item
        return None

    async def _commit(self, group: str, topic: str, item: MappingItem) -> None:
        if item.bname == self._broker_name:
            self._offsets.commit(group, topic, item.queue_id, item.start_offset)
            return
        code = RequestCode.UPDATE_CONSUMER_OFFSET
        (await self._ask_offset(code, group, topic, item, item.start_offset)).expect()

    async def _ask_offset(
        self,
        code: RequestCode,
        group: str,
        topic: str,
        item: MappingItem,
        offset: int | None = None,
    ) -> Response:
        fields = {"consumerGroup": group, "topic": topic, "setZeroIfNotFound": "false"}
        return await self._peers.ask(CLEANUP, item_ask(code, fields, item, offset))
