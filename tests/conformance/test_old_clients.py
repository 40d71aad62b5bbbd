"""Clients that people already have, unchanged: older Java clients, and the C++ client from Python.

Java clients up to 4.5.0 send to the port below the broker's by two; the C++ client sends enums as
numbers. All versions run at the same time, each with topics and groups of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conformance.peer import QUICK_JVM, java_build, quick_peer

PEER = os.environ.get("CONFORMANCE_PEER", "headrace")
PROJECT = Path(__file__).resolve().with_name("old_client")
CPP_PROGRAM = Path(__file__).resolve().with_name("cpp_client.py")
VERSIONS = ("4.3.2", "4.9.8", "5.1.4", "5.5.0")
STEPS = (
    "send_sync",
    "send_async",
    "send_oneway",
    "send_batch",
    "send_to_queue",
    "push_tags",
    "push_orderly",
    "push_broadcast",
    "push_retry",
    "delay_level",
    "transaction",
    "pull",
    "query_by_key",
    "view_by_id",
)
# The netty of 4.3 reaches into the JDK.
JVM = (
    *QUICK_JVM,
    *("--add-opens", "java.base/java.nio=ALL-UNNAMED"),
    *("--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"),
    # A consumer that misses its first rebalance tries again only after this; default 20 s.
    "-Drocketmq.client.rebalance.waitInterval=1000",
)
# Undecided transactions are checked soon.
SETTINGS = {
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
    "fastListenPort": "-1",
}
TIMEOUT_S = 400

pytestmark = [pytest.mark.conformance, pytest.mark.long]


@pytest.fixture(scope="module")
def nameserver() -> Iterator[str]:
    with quick_peer(PEER, settings=SETTINGS) as peer:
        yield peer.nameserver


@pytest.fixture(scope="module")
def outputs(nameserver: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The program's output with each version of the client."""
    with ExitStack() as stack:
        running = {}
        for version in VERSIONS:
            build, home = java_build(PROJECT, version), tmp_path_factory.mktemp(version)
            classpath = f"{build / 'classes'}{os.pathsep}{build / 'lib'}/*"
            command = ["java", f"-Duser.home={home}", *JVM, "-cp", classpath]
            prefix = f"v{version.replace('.', '')}"
            running[version] = stack.enter_context(
                subprocess.Popen(
                    [*command, "headrace.old.OldClient", nameserver, prefix],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return {name: each.communicate(timeout=TIMEOUT_S)[0] for name, each in running.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_java_clients_work_unchanged(outputs: dict[str, str], version: str) -> None:
    lines = outputs[version].splitlines()
    done = [line for line in lines if line.startswith(("ok ", "failed "))]
    assert done == [f"ok {step}" for step in STEPS], outputs[version]


@pytest.mark.parametrize("model", ["clustering", "broadcasting"])
def test_the_cpp_client_consumes_what_it_sends(nameserver: str, model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CPP_PROGRAM, nameserver, f"cpp-{model}", model],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "consumed"
