"""A small file system of its own for a daemon, without being root where Linux agrees."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Self


class OwnDisk:
    """A tmpfs at ``folder`` that only programs begun by ``command`` see, in a ``with`` block.

    It lives in the mount namespace of a process that sleeps, and goes with it.
    """

    def __init__(self, folder: Path, disk_bytes: int) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        mount = f"mount -t tmpfs -o size={disk_bytes} tmpfs {shlex.quote(str(folder))}"
        self._holder = subprocess.Popen(
            [
                *("unshare", "--user", "--map-root-user", "--mount"),
                *("sh", "-c", f"{mount} && echo mounted && exec sleep infinity"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self.is_mounted = self._holder.stdout.readline() == "mounted\n"

    @property
    def command(self) -> tuple[str, ...]:
        """What goes before the command of a program that shall see it; its pid is the program's."""
        pid = str(self._holder.pid)
        return ("nsenter", "--target", pid, "--user", "--mount", "--preserve-credentials", "--")

    @property
    def used_bytes(self) -> int:
        """As the file system counts."""
        state = os.statvfs(self.inside(self._folder))
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def inside(self, path: Path) -> Path:
        """How this process reaches a file there."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.communicate()


@cache
def may_mount() -> bool:
    """Whether this user can have such a disk on this machine."""
    try:
        with OwnDisk(Path("/mnt"), 1 << 20) as disk:
            return disk.is_mounted
    except FileNotFoundError:  # no unshare
        return False
