"""OpenTelemetry, if the program uses it; does not load it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from headrace.messages import SendResult
    from headrace.spans import SendSpan, Tracing


def tracing(client_id: str) -> Tracing | None:
    """The spans of a client; None unless the program has set a tracer provider.

    A program that has set one has loaded OpenTelemetry's API.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    unset = trace.ProxyTracerProvider | trace.NoOpTracerProvider
    if isinstance(trace.get_tracer_provider(), unset):
        return None
    from headrace.spans import Tracing

    return Tracing(client_id)


async def ended(span: SendSpan | None, sending: Awaitable[SendResult]) -> SendResult:
    """The result of ``sending``; its outcome ends the span."""
    if span is None:
        return await sending
    try:
        result = await sending
    except BaseException as error:
        span.end(error)
        raise
    span.end(result)
    return result
