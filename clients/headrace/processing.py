"""Iterators that tell when the processing of each message or batch begins and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from headrace.received import MessageBatch, ReceivedMessage

if TYPE_CHECKING:
    from headrace.telemetry import ProcessSpan, Tracing

Item = TypeVar("Item", bound=ReceivedMessage | MessageBatch)


class ProcessSpans(AsyncIterator[Item], Generic[Item]):
    """Messages or batches, each with the span of its processing until the next is asked for."""

    def __init__(self, items: AsyncIterator[Item], tracing: Tracing, group: str) -> None:
        self._items = items
        self._tracing = tracing
        self._group = group
        self._span: ProcessSpan | None = None

    async def __anext__(self) -> Item:
        self._end()
        item = await anext(self._items)
        self._span = self._tracing.process(item, self._group)
        return item

    def __del__(self) -> None:
        """End the span of a loop that was left."""
        self._end()

    def _end(self) -> None:
        span, self._span = self._span, None
        if span:
            span.end()


class Processing:
    """The span of a message that is out, until it is settled, or forgotten by the program."""

    def __init__(self, span: ProcessSpan) -> None:
        self._span: ProcessSpan | None = span

    def end(self) -> None:
        """End the span, once."""
        span, self._span = self._span, None
        if span:
            span.end()

    def __del__(self) -> None:
        self.end()


def process_each(items: Iterator[Item], tracing: Tracing, group: str) -> Iterator[Item]:
    """``ProcessSpans`` for blocking code."""
    for item in items:
        span = tracing.process(item, group)
        try:
            yield item
        finally:
            span.end()
