"""Metrics of both daemons: clients, refusals, the loop, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_daemon.logs import dropped_log_lines
from headrace_daemon.metrics.samples import Metric
from headrace_protocol import __version__
from headrace_protocol.codes import ResponseCode
from headrace_protocol.waiting import take_break

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace_daemon.audit.audit_log import AuditLog
    from headrace_daemon.metrics.samples import Samples
    from headrace_daemon.serving.server import RemotingServer
    from headrace_daemon.watchdog import Watchdog
    from headrace_protocol.serving import Registry

BUILD = Metric("headrace_build_info", "gauge", "1, with the version of headrace", ("version",))
CONNECTIONS = Metric("headrace_connections", "gauge", "Connected clients")
HELD_BYTES = Metric(
    "headrace_held_bytes",
    "gauge",
    "Memory held for clients: unread replies, unfinished frames, waiting requests",
)
REFUSALS = Metric(
    "headrace_refusals_total",
    "counter",
    "Refusals by stage: connection, client (closed for broken frames or for holding too much),"
    " guard, body, request",
    ("stage", "response_code"),
)
STALLS = Metric("headrace_loop_stalls_total", "counter", "Steps of the loop of more than 20 ms")
STALLED_SECONDS = Metric(
    "headrace_loop_stalled_seconds_total", "counter", "Time that the loop spent in such steps"
)
LONGEST_STALL = Metric(
    "headrace_loop_longest_stall_seconds", "gauge", "The longest step since the start"
)
LONGEST_COLLECTION = Metric(
    "headrace_longest_garbage_collection_seconds", "gauge", "Since the start"
)
LATE = Metric(
    "headrace_late_answers_total",
    "counter",
    "Requests that took over 1 s, except pulls that waited for messages",
)
ERRORS = Metric(
    "headrace_unexpected_errors_total", "counter", "Faults of headrace, each with a log line"
)
WAITING = Metric(
    "headrace_waiting_requests",
    "gauge",
    "Requests that wait for the disk, another broker or another part, by that part",
    ("waits_for",),
)
DROPPED_LINES = Metric(
    "headrace_dropped_log_lines_total", "counter", "Log lines that standard error did not take"
)

CERTIFICATE_EXPIRY = Metric(
    "headrace_certificate_expiry_seconds",
    "gauge",
    "Unix time at which the certificate of the ports expires; absent without TLS",
)

AUDIT_DROPPED = Metric(
    "headrace_audit_dropped_total",
    "counter",
    "Lines that the audit log did not take; absent without one",
)
AUDIT_FAILING = Metric(
    "headrace_audit_failing_seconds",
    "gauge",
    "Time for which the audit log can't be written; 0 if it can",
)

QUOTA_HELD = Metric(
    "headrace_quota_held_total", "counter", "Reads held back for a quota", ("of", "name")
)
QUOTA_REFUSED = Metric(
    "headrace_quota_refused_total", "counter", "Requests refused for a quota", ("of", "name")
)

DAEMON_METRICS = (
    BUILD,
    CONNECTIONS,
    HELD_BYTES,
    REFUSALS,
    STALLS,
    STALLED_SECONDS,
    LONGEST_STALL,
    LONGEST_COLLECTION,
    LATE,
    ERRORS,
    WAITING,
    DROPPED_LINES,
    CERTIFICATE_EXPIRY,
    AUDIT_DROPPED,
    AUDIT_FAILING,
    QUOTA_HELD,
    QUOTA_REFUSED,
)


class DaemonMetrics:
    """Collects ``DAEMON_METRICS``. unexpected_errors: how many there were."""

    def __init__(
        self,
        server: RemotingServer,
        registry: Registry,
        watchdog: Watchdog,
        unexpected_errors: Callable[[], int],
        audit: AuditLog | None = None,
    ) -> None:
        self._server = server
        self._registry = registry
        self._watchdog = watchdog
        self._unexpected_errors = unexpected_errors
        self._audit = audit

    async def __call__(self, samples: Samples) -> None:
        """See ``Collect``."""
        watchdog = self._watchdog
        samples.add(BUILD, 1, __version__)
        samples.add(CONNECTIONS, len(self._server.channels))
        samples.add(HELD_BYTES, self._server.held_bytes)
        self._add_refusals(samples)
        samples.add(STALLS, watchdog.stall_count)
        samples.add(STALLED_SECONDS, watchdog.stalled_ms / 1000)
        samples.add(LONGEST_STALL, watchdog.longest.ms / 1000)
        samples.add(LONGEST_COLLECTION, watchdog.longest_collection_ms / 1000)
        samples.add(LATE, self._server.late.counts.total())
        samples.add(ERRORS, self._unexpected_errors())
        for waits_for, count in self._registry.waiting().items():
            samples.add(WAITING, count, waits_for)
        samples.add(DROPPED_LINES, dropped_log_lines())
        if (certificates := self._server.certificates) is not None:
            samples.add(CERTIFICATE_EXPIRY, certificates.expires_s)
        if (audit := self._audit) is not None:
            samples.add(AUDIT_DROPPED, audit.dropped_count)
            samples.add(AUDIT_FAILING, audit.failing_s)
        await take_break()

    def _add_refusals(self, samples: Samples) -> None:
        server = self._server
        samples.add(REFUSALS, server.turned_away_count, "connection", "")
        samples.add(REFUSALS, server.faulty_client_count, "client", "")
        for (stage, code), count in self._registry.refusals.items():
            samples.add(REFUSALS, count, stage, _code_name(code))


def _code_name(code: int) -> str:
    return ResponseCode(code).name if code in _RESPONSE_CODES else str(code)


_RESPONSE_CODES = frozenset(ResponseCode)
