"""Spark's ``format("headrace")``: batch and streaming reads and writes on PySpark 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spark.sessions import session as session

__all__ = ["session"]


def __getattr__(name: str) -> Any:
    # Tasks load this package too, and start no session.
    if name == "session":
        from headrace.spark.sessions import session

        return session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
