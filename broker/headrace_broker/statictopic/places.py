"""Places of static topics' queues, one more directory in front of the broker's own queues.

Sends go to the leader of a logic queue, and pulls read its whole chain. All other uses name
physical queues, so they find what they find in a plain topic.
Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_reader.py.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from headrace_broker.queue_directory import Lookup, Use
from headrace_protocol.statictopic.offsets import offset_delta

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_broker.queue_directory import (
        GroupPositions,
        Place,
        QueueDirectory,
        Reader,
        Source,
    )
    from headrace_broker.statictopic.leaders import Leaders
    from headrace_broker.statictopic.reader import MakeReader
    from headrace_protocol.bodies import TopicConfig
    from headrace_protocol.statictopic.mapping import TopicMapping


class StaticPlaces:
    """Finds the places of static topics' queues."""

    def __init__(
        self, leaders: Leaders, make_reader: MakeReader, positions: GroupPositions
    ) -> None:
        self._leaders = leaders
        self._make_reader = make_reader
        self._positions = positions

    def place(self, directory: QueueDirectory, lookup: Lookup) -> Place | None:
        """The place of a queue of a static topic; see ``FindPlace``."""
        mapping = self._leaders.mappings.get(lookup.topic.topic_name)
        if mapping is None:
            return None
        if lookup.use is Use.SEND:
            return self._writable(directory, lookup, mapping)
        if lookup.use is Use.PULL:
            return self._readable(directory, lookup, mapping)
        if lookup.use is Use.LIST:
            # As Apache's broker reports it: older items may have the positions of a group.
            return directory.local(lookup)._replace(no_position=-1)
        return None

    def _writable(self, directory: QueueDirectory, lookup: Lookup, mapping: TopicMapping) -> Place:
        queue_id = lookup.queue_id
        if queue_id < 0:
            queue_id = random.choice(self._leaders.led(mapping))
        leader = self._leaders.chain(mapping.topic, queue_id)[-1]
        here = directory.local(lookup._replace(queue_id=leader.queue_id))
        delta = None if leader.logic_offset < 0 else offset_delta(leader)
        return here._replace(queue_id=queue_id, offset_delta=delta)

    def _readable(self, directory: QueueDirectory, lookup: Lookup, mapping: TopicMapping) -> Place:
        leader = self._leaders.chain(mapping.topic, lookup.queue_id)[-1]
        here = directory.local(lookup._replace(queue_id=leader.queue_id))
        find_source = partial(_source, directory, lookup.topic)
        make = partial(self._make_reader, mapping.topic, lookup.queue_id)

        def filtered(text: str, apply: Callable[[Reader], Reader]) -> Reader:
            reader = make(lambda physical: apply(find_source(physical)))
            reader.filter_text = text
            return reader

        return here._replace(
            queue_id=lookup.queue_id,
            reader=make(find_source),
            positions=self._positions,
            filtered=filtered,
        )


def _source(directory: QueueDirectory, topic: TopicConfig, physical: int) -> Source:
    return directory.local_source(Lookup(topic, physical, Use.PULL))
