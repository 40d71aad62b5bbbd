"""Errors that Spark shows in one line, without the traceback of its worker process."""

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
Result = TypeVar("Result")

_HIDE_TRACEBACK = "SPARK_HIDE_TRACEBACK"


def brief(method: Callable[P, Result]) -> Callable[P, Result]:
    """A method that Spark calls in a worker process, with brief HeadraceErrors."""

    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> Result:
        try:
            return method(*arguments, **named)
        except HeadraceError:
            _hide_traceback()
            raise

    return call


def brief_rows(method: Callable[P, Iterator[Result]]) -> Callable[P, Iterator[Result]]:
    """As ``brief``, for a method that yields."""

    @wraps(method)
    def rows(*arguments: P.args, **named: P.kwargs) -> Iterator[Result]:
        try:
            yield from method(*arguments, **named)
        except HeadraceError:
            _hide_traceback()
            raise

    return rows


def _hide_traceback() -> None:
    """Have the worker leave out the traceback. A worker with an error ends, so only this one."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.startswith("pyspark."):
        os.environ[_HIDE_TRACEBACK] = "1"
