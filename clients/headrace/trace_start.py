"""The start of a client's message trace, which loads it only where it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from headrace.instance import ClientInstance


def start_traces(instance: ClientInstance, tasks: TaskGroup) -> None:
    """Have a client that is open trace its messages, if its options say so."""
    if instance.trace_topic is None:
        return
    from headrace.traces import Both, Traces

    traces = Traces(instance, instance.trace_topic)
    instance.traces = traces
    instance.tracing = Both(instance.tracing, traces) if instance.tracing else traces
    tasks.start_soon(traces.run)
