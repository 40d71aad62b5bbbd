"""A Spark session in which ``format("headrace")`` does all it can."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.spark.java import java_home

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

OLDEST_PYSPARK = "4.0"


class PySparkMissing(HeadraceError):
    """PySpark is not installed, or one from before Python data sources."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"headrace's source and sink need PySpark {OLDEST_PYSPARK} or newer, and {found}: "
            "pip install 'headrace[spark]'"
        )


def session(
    name: str = "headrace",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """The running session, or a new one: a Java is found, workers run this Python.

    name: of the application. master: such as ``"local[2]"``; None for what the environment or
    ``settings`` say, else all cores of this machine. settings: further ones of Spark.
    Filters stay in Spark. ``spark.sql.python.filterPushdown.enabled`` in ``settings`` lets the
    source have them, but Spark 4.3 then gives a DataFrame that is read twice with two filters
    the rows of the first one.

    Raises JavaNotFound, PySparkMissing.
    """
    check_installed()
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is None:
        os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def check_installed() -> None:
    """Raise PySparkMissing unless there is a PySpark that will do."""
    try:
        found = version("pyspark")
    except PackageNotFoundError:
        raise PySparkMissing("there is none") from None
    if int(found.partition(".")[0]) < 4:
        raise PySparkMissing(f"this is {found}")
