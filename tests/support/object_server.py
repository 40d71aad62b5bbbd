"""A real S3 server for tests: versitygw, a folder served as a bucket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace_protocol.tier.location import Location
from tests.support import building
from tests.support.ports import free_port, is_open
from tests.support.until import wait_until

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "bin"
MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BUCKET = "headrace"
ACCESS_KEY = "headrace"
SECRET_KEY = "headrace-secret"
START_TIMEOUT_S = 30.0


def build() -> Path | None:
    """The program, built if it is missing; None without Go. Raises BuildFailed.

    The first build takes some minutes of one core; the program stays in the project's cache.
    """
    program = CACHE / "versitygw"
    if program.exists():
        return program
    if shutil.which("go") is None:
        return None
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            building.build(["go", "install", MODULE], CACHE, {**os.environ, "GOBIN": str(CACHE)})
    return program


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Location]:
    """As ``running``; yields only the bucket."""
    with running(folder) as (location, _):
        yield location


@contextlib.contextmanager
def running(
    folder: Path, options: Sequence[str] = ()
) -> Iterator[tuple[Location, subprocess.Popen[bytes]]]:
    """A server for the length of a block; skips the test where it can't be built.

    folder: an empty one. options: more of the program's. Yields the only bucket, and the process.
    """
    program = build()
    if program is None:
        pytest.skip("go not found on PATH: versitygw needs it (Debian: apt-get install golang)")
    # Attributes in files of their own: not every file system has extended ones.
    objects, attributes = folder / "objects", folder / "attributes"
    (objects / BUCKET).mkdir(parents=True)
    attributes.mkdir()
    port = free_port()
    command = [str(program), "--port", f"127.0.0.1:{port}", "--quiet", *options, "posix"]
    environment = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    with subprocess.Popen(
        [*command, "--sidecar", str(attributes), str(objects)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _wait_until_open(process, port)
            endpoint = f"http://127.0.0.1:{port}"
            keys = ("access_key_id", ACCESS_KEY), ("secret_access_key", SECRET_KEY)
            yield Location(f"s3://{BUCKET}", endpoint, config=keys), process
        finally:
            process.kill()


def below(location: Location, prefix: str) -> Location:
    """A location in the bucket."""
    return location._replace(url=f"{location.url}/{quote(prefix)}")


def bucket_settings(location: Location, prefix: str = "") -> dict[str, Any]:
    """The settings of a broker whose tier is in the bucket, by key of the file."""
    return {
        "messageStorePlugIn": "tieredstore",
        "tieredBackendServiceProvider": "s3",
        "objectStoreEndpoint": location.endpoint,
        "objectStoreBucket": BUCKET,
        "objectStorePrefix": prefix,
        "objectStoreAccessKey": ACCESS_KEY,
        "objectStoreSecretKey": SECRET_KEY,
    }


def _wait_until_open(process: subprocess.Popen[bytes], port: int) -> None:
    def is_up() -> bool:
        assert process.poll() is None, "the S3 server ended"
        return is_open(port)

    wait_until(is_up, "the S3 server does not listen", START_TIMEOUT_S)
