"""A disk that runs full and heals: a real one where this user may mount, and a quota anywhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support import own_disk
from tests.support.full_disk import FullDisk
from tests.support.full_maps import WRITERS
from tests.support.quota_files import QuotaFiles

ROOT = Path(__file__).parents[2]
DISK_BYTES = 16 << 20
# A file system of its own, seen by one process only: also without being root.
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
# Many small files, and two that leave no room for a third.
SIZES = pytest.mark.parametrize("log_file_bytes", [1 << 20, 13 << 19])


def on_tmpfs(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    mount = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {shlex.quote(str(folder))}"
    return subprocess.run(
        [*NAMESPACE, "sh", "-c", f"{mount} && exec {command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@cache
def may_mount() -> bool:
    try:
        return on_tmpfs(Path("/mnt"), "true").returncode == 0
    except FileNotFoundError:  # no unshare
        return False


@pytest.mark.slow
@SIZES
async def test_within_a_quota(tmp_path: Path, log_file_bytes: int) -> None:
    run = FullDisk(tmp_path, log_file_bytes, QuotaFiles(tmp_path, DISK_BYTES))
    assert "the disk" in await run.run()


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="this user may not mount; the quota stands in")
@SIZES
def test_on_a_file_system_of_its_own(tmp_path: Path, log_file_bytes: int) -> None:
    program = f"{sys.executable} -m tests.support.full_disk {tmp_path} {log_file_bytes}"
    done = on_tmpfs(tmp_path, program)
    assert done.returncode == 0, done.stderr
    assert "the disk" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not own_disk.may_mount(own_disk.EXT4), reason="only root may mount ext4")
@pytest.mark.parametrize("block_bytes", [1024, 4096])
@pytest.mark.parametrize("written", [1, 300])
@pytest.mark.parametrize("kind", [*WRITERS])
def test_a_map_is_never_written_without_room(
    tmp_path: Path, kind: str, written: int, block_bytes: int
) -> None:
    folder = tmp_path / "disk"
    with own_disk.OwnDisk(folder, DISK_BYTES, own_disk.EXT4, block_bytes=block_bytes) as disk:
        path = ("env", f"PYTHONPATH={ROOT}")  # the working folder is another one there
        program = (sys.executable, "-m", "tests.support.full_maps", folder, kind, str(written))
        done = subprocess.run(
            (*disk.command, *path, *program), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout} {done.stderr}"
    assert re.fullmatch(r"\d+ of \d+", done.stdout)
