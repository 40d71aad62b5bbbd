"""An operator's view of the members of a group: what each reports about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.admin.group_view import strategy_of
from headrace.admin.output import queue_columns, time_text
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.admin.groups import MemberReport
    from headrace_protocol.bodies import ClientConnection, ConsumerRunningInfo

_STARTED, _VERSION, _ORDERED = (
    "PROP_CONSUMER_START_TIMESTAMP",
    "PROP_CLIENT_VERSION",
    "PROP_CONSUMEORDERLY",
)
# Columns of a topic, and the member's names; most clients measure them.
_MEASURED = {
    "processed_per_s": "consumeOKTPS",
    "failed_per_s": "consumeFailedTPS",
    "failed_in_hour": "consumeFailedMsgs",
    "processing_ms": "consumeRT",
    "pulled_per_s": "pullTPS",
    "pull_ms": "pullRT",
}


def connection_columns(client: ClientConnection) -> dict[str, Any]:
    """The columns that name a member."""
    return {
        "member": client.client_id,
        "address": client.client_addr,
        "language": client.language,
    }


class MemberView(NamedTuple):
    """Rows about the members of a group, from their reports."""

    reports: list[MemberReport]

    def rows(self) -> dict[str, Any]:
        """The tables, by name. A member that does not answer has a ``problem`` and no more."""
        return {
            "members": [_member_row(each) for each in self.reports],
            "queues": [row for name, report in self._answers() for row in _queues(name, report)],
            "topics": [row for name, report in self._answers() for row in _topics(name, report)],
        }

    def _answers(self) -> list[tuple[str, ConsumerRunningInfo]]:
        return [
            (each.client.client_id, each.report)
            for each in self.reports
            if not isinstance(each.report, HeadraceError)
        ]


def _member_row(member: MemberReport) -> dict[str, Any]:
    report = None if isinstance(member.report, HeadraceError) else member.report
    properties = report.properties if report else {}
    started, ordered = properties.get(_STARTED, ""), properties.get(_ORDERED)
    return {
        **connection_columns(member.client),
        "version": properties.get(_VERSION),
        "started": time_text(int(started)) if started.isdecimal() else None,
        "strategy": strategy_of(report),
        "ordered": None if ordered is None else ordered == "true",
        "queues": len(report.mq_table) if report else None,
        "problem": None if report else str(member.report),
    }


def _queues(name: str, report: ConsumerRunningInfo) -> list[dict[str, Any]]:
    return [
        {
            "member": name,
            **queue_columns(queue),
            "offset": _of(state, "commitOffset"),
            "cached": _of(state, "cachedMsgCount"),
            "locked": _of(state, "locked"),
        }
        for queue, state in sorted(report.mq_table.items())
    ]


def _topics(name: str, report: ConsumerRunningInfo) -> list[dict[str, Any]]:
    subscriptions = {_of(each, "topic"): each for each in report.subscription_set}
    topics = sorted({str(name) for name in (*subscriptions, *report.status_table) if name})
    return [
        {
            "member": name,
            "topic": topic,
            "tag": _of(subscriptions.get(topic), "subString"),
            **{
                column: _of(report.status_table.get(topic), field)
                for column, field in _MEASURED.items()
            },
        }
        for topic in topics
    ]


def _of(values: object, name: str) -> Any:
    """A field of what a member reports, whatever that is."""
    return values.get(name) if isinstance(values, Mapping) else None
