"""The leaders of logic queues: this broker, or another one to which requests are passed.

Source: docs/static-topics.md "Requests"; tests/broker/statictopic/test_static_forward.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_broker.queue_directory import Elsewhere
from headrace_protocol.codes import ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import ServedElsewhere

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace_broker.statictopic.table import MappingTable
    from headrace_protocol.headers import RequestHeader
    from headrace_protocol.serving import Request, RequestFunction, Work
    from headrace_protocol.statictopic.mapping import Chain, MappingInfo, TopicMapping

Header = TypeVar("Header", bound="RequestHeader")
# Passes a request for a topic's logic queue to its leader.
PassOn = Callable[[str, int, "Request"], "Work"]


class Leaders:
    """The leaders of logic queues: those that this broker's mappings name, or newer ones.

    The mapping of a broker that is neither leader nor second leader may be old, so where a leader
    denies that it is one, the route counts.
    """

    def __init__(
        self, mappings: MappingTable, known_address: Callable[[str], str], pass_on: PassOn
    ) -> None:
        """known_address: returns a broker's address, "" if it is not known yet."""
        self.mappings = mappings
        self._known_address = known_address
        self._pass_on = pass_on
        # Topic and logic queue -> the leader by a route.
        self._routed: dict[tuple[str, int], str] = {}
        mappings.subscribe(self._routed.clear)

    def guard(
        self, header_type: type[Header], serve: Callable[[Header, Request], Work]
    ) -> RequestFunction:
        """A guard that takes requests over which are about the logic queues of a topic."""

        def guard(request: Request) -> Work | None:
            if self.mappings.is_empty:
                return None
            header: Any = request.header(header_type)
            is_logic = getattr(header, "logical", None) is not False
            is_here = is_logic and self.mappings.get(header.topic) is not None
            return serve(header, request) if is_here else None

        return guard

    def led(self, mapping: TopicMapping) -> list[int]:
        """The logic queues of a topic that take messages here, if any. Raises RequestError."""
        if led := list(self.mappings.led(mapping.topic)):
            return led
        raise RequestError(
            ResponseCode.NOT_LEADER_FOR_QUEUE,
            f"broker {mapping.bname} leads no queue of the static topic {mapping.topic}: ask for "
            "the route again",
        )

    def chain(self, topic: str, queue: int) -> Chain:
        """The chain of a logic queue that this broker leads.

        Raises ServedElsewhere for a queue of another leader, RequestError for one without.
        """
        mapping = self.mappings.get(topic)
        if mapping is None:
            self.mappings.check_usable(topic)
            raise RequestError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] is not static")
        chain = mapping.chain(queue)
        if chain is None:
            raise _unknown(mapping, queue)
        leader = chain[-1].bname
        pass_on = partial(self._pass_on, topic, queue)
        if leader != mapping.bname:
            address = self._known_address(leader) or "an address not looked up yet"
            raise Elsewhere(leader, address, pass_on).rejection(topic, queue)
        if self.mappings.leads(topic, queue) is None:
            reason = self.mappings.stopped(topic, queue) or "it checks its mappings"
            raise ServedElsewhere(
                ResponseCode.NOT_LEADER_FOR_QUEUE,
                f"broker {mapping.bname} does not serve queue {queue} of the static topic "
                f"{topic} now: {reason}; ask for the route again",
                pass_on,
            )
        return chain

    def leader_of(self, topic: str, queue: int) -> str | None:
        """The broker that leads a queue; None while this broker knows none that does."""
        mapping = self.mappings.get(topic)
        chain = mapping.chain(queue) if mapping is not None else None
        if mapping is None or chain is None:
            return None
        leader = chain[-1].bname
        if leader == mapping.bname:
            return None if self.mappings.leads(topic, queue) is None else leader
        return self._routed.get((topic, queue), leader)

    def note_route(
        self, topic: str, infos: Iterable[MappingInfo], denied: Mapping[int, str]
    ) -> None:
        """Note the leaders that a route names, if it is as new as this broker's mapping.

        denied: by queue, a broker that does not lead it although the route may say so.
        """
        mapping = self.mappings.get(topic)
        if mapping is None:
            return
        for info in sorted(infos, key=lambda info: info.epoch):
            # A queue that was closed here stays registered until its new leader is.
            if info.epoch >= mapping.epoch and info.bname != mapping.bname:
                for queue in info.curr_id_map:
                    if denied.get(queue) != info.bname:
                        self._routed[topic, queue] = info.bname


def _unknown(mapping: TopicMapping, queue: int) -> RequestError:
    topic, total = mapping.topic, mapping.total_queues
    if not 0 <= queue < total:
        return RequestError(
            ResponseCode.INVALID_PARAMETER,
            f"queue {queue} of the static topic {topic}: it has queues 0 to {total - 1}",
        )
    return RequestError(
        ResponseCode.NOT_LEADER_FOR_QUEUE,
        f"queue {queue} of the static topic {topic} was never on broker {mapping.bname}: ask for "
        "the route again",
    )
