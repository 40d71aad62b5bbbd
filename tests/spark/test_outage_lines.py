"""Spark's retries log an outage once, and its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import ConnectFailed, NameserverUnavailable
from headrace.spark import retry
from headrace.spark.retry import Patience, retry_transient
from headrace.spark.write.broker_link import BrokerLink
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.serving import Reply
from tests.support.scripted import close, scripted_in_thread

QUICK = Patience(60, 0.001)


def failing(*errors: Exception) -> Callable[[], int]:
    """Work that raises these errors before it succeeds."""
    left = list(errors)

    def work() -> int:
        if left:
            raise left.pop(0)
        return 7

    return work


def test_many_attempts_are_one_line_and_their_end_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = ConnectFailed("a:1", "refused")
    away = NameserverUnavailable({"n:2": down, "n:1": down})
    assert retry_transient(failing(*[down] * 20, *[away] * 20), QUICK) == 7
    assert [text.partition(":")[0] for text in sorted(caplog.messages)] == [
        "broker at a",
        "broker at a",
        "nameserver n",
        "nameserver n",
    ]
    ends = [text for text in caplog.messages if text.endswith("is available again after 0 s")]
    assert sorted(ends) == [
        "broker at a:1 is available again after 0 s",
        "nameserver n:1, n:2 is available again after 0 s",
    ]


def test_work_that_is_given_up_does_not_count_as_back(caplog: pytest.LogCaptureFixture) -> None:
    down = ConnectFailed("b:1", "refused")
    with pytest.raises(ConnectFailed):
        retry_transient(failing(*[down] * 10_000), Patience(0.05, 0.001))
    assert len(caplog.messages) == 1
    assert "broker at b:1" not in retry.OUTAGES.names


def test_a_link_that_resends_logs_the_outage(caplog: pytest.LogCaptureFixture) -> None:
    busy = Reply(code=ResponseCode.SYSTEM_BUSY)
    with scripted_in_thread() as (broker,), BrokerLink(broker.address, patience=QUICK) as link:
        broker.answer(RequestCode.GET_BROKER_RUNTIME_INFO, *[close] * 5, *[busy] * 5, Reply())
        assert link.ask(RequestCode.GET_BROKER_RUNTIME_INFO).command.code == ResponseCode.SUCCESS
        first, last = caplog.messages
        assert first.startswith(f"broker at {broker.address} is unavailable, retrying: ")
        assert last == f"broker at {broker.address} is available again after 0 s"
