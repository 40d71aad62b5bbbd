"""Admin: an operator's queries and changes, across all brokers of a nameserver."""

from __future__ import annotations

from headrace.admin.message_trace import TraceAdmin
from headrace.admin.quotas import QuotaAdmin
from headrace.admin.rights import RightsAdmin
from headrace.admin.tier import TierAdmin
from headrace.admin.topics import TopicAdmin
from headrace.admin.waiting import WaitingAdmin


class Admin(TopicAdmin, TraceAdmin, WaitingAdmin, TierAdmin, RightsAdmin, QuotaAdmin):
    """Inspects and changes topics, groups and brokers; use it in an ``async with`` block.

    Changes go to the masters of all brokers that the nameserver knows, or only to that of the given
    ``broker``. Every master is tried before the first error is raised.
    Raises NameserverUnavailable, ConnectFailed, RequestTimeout, BrokerError (the broker's refusal).

    problems: a method that asks several brokers raises if one of them fails. Given a list of
    ``problems``, it appends the failure instead, returns what the others answer, and raises only if
    none answers. It skips brokers that are already in the list, so several calls can share one.
    A broker that left with a part of the topic counts as failed, with PartialAnswer.
    """
