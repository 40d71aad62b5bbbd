"""Builds all that tests run beside headrace: ``python -m tests.conformance.builds``.

All at once, and before any test runs: a test that waits for a compiler, which other tests slow
down, looks like one that hangs.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.conformance.go_client import go_build, missing_go
from tests.conformance.peer import java_build, missing_tools
from tests.support import object_server
from tests.support.building import BuildFailed


def java() -> None:
    if not missing_tools():
        java_build()


def go() -> None:
    """One after the other: both compile the same modules."""
    if not missing_go():
        go_build()
        go_build(newest=True)


def main() -> None:
    with ThreadPoolExecutor() as pool:
        builds = [pool.submit(build) for build in (object_server.build, java, go)]
    try:
        for each in builds:
            each.result()
    except BuildFailed as failure:
        sys.exit(str(failure))


if __name__ == "__main__":
    main()
