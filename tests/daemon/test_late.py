"""Late answers cost a log line a half minute for each code, and each is counted."""

from __future__ import annotations

import structlog.testing

from headrace_daemon.late import LateRequests
from headrace_protocol.codes import RequestCode
from headrace_protocol.command import Command
from headrace_protocol.serving import Request
from tests.support.channel import MemoryChannel


def request(code: RequestCode) -> Request:
    return Request(MemoryChannel(), 0, Command(code), b"", 0)


def test_late_answers_are_logged_once_a_half_minute_and_code() -> None:
    times = iter((0.0, 1.0, 29.0, 30.5, 30.5))
    late = LateRequests(lambda: next(times))
    query, end = request(RequestCode.QUERY_MESSAGE), request(RequestCode.END_TRANSACTION)
    with structlog.testing.capture_logs() as logs:
        for _ in range(4):
            late.note(query, {"slices": 0.25, "old data": 3.0})
        late.note(end, {"another broker": 1.5})
    assert [(each["request"], each["late_since_last_line"]) for each in logs] == [
        ("QUERY_MESSAGE", 1),
        ("QUERY_MESSAGE", 3),
        ("END_TRANSACTION", 1),
    ]
    assert [each["seconds"] for each in logs] == [3.2, 3.2, 1.5]
    assert logs[0]["waited_for"] == "old data 3.0 s, slices 0.2 s"
    assert logs[0]["client"] == query.channel.address
    assert late.counts == {"QUERY_MESSAGE": 4, "END_TRANSACTION": 1}
