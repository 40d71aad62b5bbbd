"""Report that Spark runs the plan of a batch read again, which has only the older messages.

Spark plans a read once for each DataFrame that ``load()`` returns: in a join with a stream, in a
view and in a second ``count()`` the tasks are those of the first time.
"""

from __future__ import annotations

import logging

from pyspark import TaskContext

_EXECUTION = "spark.sql.execution.id"
# Plans that this worker process remembers.
_PLANS_MAX = 1000

_log = logging.getLogger("headrace.spark")


class _Plan:
    """A plan that a worker has run. is_reported: whether its repetition was logged."""

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.is_reported = False


_plans: dict[str, _Plan] = {}


def execution_id() -> str | None:
    """The query of the running task; None if it has none."""
    context = TaskContext.get()
    return context.getLocalProperty(_EXECUTION) if context else None


def warn_if_repeated(plan_id: str | None, execution: str | None, topics: str) -> None:
    """Log a warning, once, if this worker process ran the plan for an earlier query."""
    if plan_id is None or execution is None:
        return
    if len(_plans) >= _PLANS_MAX:
        _plans.clear()
    plan = _plans.setdefault(plan_id, _Plan(execution))
    if plan.execution != execution and not plan.is_reported:
        plan.is_reported = True
        _log.warning(
            "this read of %s was planned for an earlier query or micro-batch, and has none of the "
            "messages that came since: call load() again, or with keys use option table=true",
            topics,
        )
