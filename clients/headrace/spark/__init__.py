"""Spark's ``format("headrace")``: batch and streaming reads and writes on PySpark 4."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spark.body.models import model_schema as model_schema
    from headrace.spark.body.models import typed as typed
    from headrace.spark.sessions import session as session

# Imported on first use: tasks import this package too, but need neither a session nor a model.
_HOMES = {
    "model_schema": "headrace.spark.body.models",
    "session": "headrace.spark.sessions",
    "typed": "headrace.spark.body.models",
}

__all__ = ["model_schema", "session", "typed"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
