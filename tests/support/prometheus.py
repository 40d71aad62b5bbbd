"""A real Prometheus with promtool, from PATH or from Debian's package."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "prometheus"
_START_S = 60
_LISTENING = re.compile(r'msg="?Listening on"? address=(\S+)')


class PrometheusMissing(Exception):
    """It is not on this machine, and could not be fetched; the text says why."""


def tool(name: str) -> str:
    """Path of ``prometheus`` or ``promtool``. Raises PrometheusMissing.

    The first call on a machine without it unpacks Debian's package, some 60 MB, into .cache;
    nothing is installed. Later ones need no network.
    """
    if found := shutil.which(name):
        return found
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unpacked = CACHE / "usr" / "bin" / name
        if not unpacked.exists():
            _fetch()
    return str(unpacked)


def _fetch() -> None:
    if missing := [each for each in ("apt-get", "dpkg-deb") if shutil.which(each) is None]:
        raise PrometheusMissing(
            f"no prometheus on PATH, and without {' and '.join(missing)} Debian's package can't be "
            "had: install Prometheus 2.40 or newer"
        )
    done = _run("apt-get", "download", "prometheus")
    if done.returncode:
        _run("apt-get", "update")  # the lists of packages may be old, or missing
        done = _run("apt-get", "download", "prometheus")
    if done.returncode:
        raise PrometheusMissing(
            f"no prometheus on PATH, and `apt-get download prometheus` failed: {done.stderr}"
        )
    (package,) = CACHE.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, CACHE], check=True)
    package.unlink()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=CACHE, capture_output=True, text=True, check=False)


class Prometheus:
    """A running server. address: where its API is."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant vector."""
        samples: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return samples

    def value(self, expression: str) -> float | None:
        """The value of the only sample; None if there is none."""
        samples = self.query(expression)
        assert len(samples) <= 1, samples
        return float(samples[0]["value"][1]) if samples else None


@contextmanager
def running(folder: Path, config: str) -> Iterator[Prometheus]:
    """A Prometheus on a free loopback port, with ``config`` as prometheus.yml."""
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(config)
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Prometheus(_address(process, log))
    finally:
        process.terminate()
        process.wait(_START_S)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while (found := _LISTENING.search(log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"prometheus did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return found[1]
