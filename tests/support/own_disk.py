"""A small file system of its own for a daemon: a tmpfs for any user, where Linux agrees."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Self

TMPFS = "tmpfs"
EXT4 = "ext4"
# Namespaces: root needs none of the user, and may mount more with its own rights.
_USER = () if os.geteuid() == 0 else ("--user",)


class OwnDisk:
    """A file system at ``folder`` that only programs begun by ``command`` see, in a ``with`` block.

    It lives in the mount namespace of a process that sleeps, and goes with it.
    """

    def __init__(
        self,
        folder: Path,
        disk_bytes: int,
        kind: str = TMPFS,
        inodes: int = 0,
        block_bytes: int = 1024,
    ) -> None:
        """kind: EXT4 for root only, made in a file beside the folder. inodes: 0 for the default.

        block_bytes: of an EXT4; the default is that of small ones.
        """
        folder.mkdir(exist_ok=True)
        self._folder = folder
        where = shlex.quote(str(folder))
        if kind == TMPFS:
            options = f"size={disk_bytes}" + (f",nr_inodes={inodes}" if inodes else "")
            mount = f"mount -t tmpfs -o {options} tmpfs {where}"
        else:
            image = f"{where}.image"
            count = f"-N {inodes}" if inodes else ""
            options = f"-q -m 0 -b {block_bytes} {count}"
            made = f"truncate -s {disk_bytes} {image} && mkfs.ext4 {options} {image}"
            mount = f"{made} && mount -o loop {image} {where}"
        map_root = ("--map-root-user",) if _USER else ()
        self._holder = subprocess.Popen(
            [
                *("unshare", *_USER, *map_root, "--mount"),
                *("sh", "-c", f"({mount}) >&2 && echo mounted && exec sleep infinity"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self.is_mounted = self._holder.stdout.readline() == "mounted\n"

    @property
    def command(self) -> tuple[str, ...]:
        """The words before the command of a program that shall see it; its pid is the program's."""
        pid = str(self._holder.pid)
        preserve = ("--preserve-credentials",) if _USER else ()
        return ("nsenter", "--target", pid, *_USER, "--mount", *preserve, "--")

    @property
    def used_bytes(self) -> int:
        """As the file system counts."""
        state = os.statvfs(self.inside(self._folder))
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    def inside(self, path: Path) -> Path:
        """The path by which this process reaches a file there."""
        return Path(f"/proc/{self._holder.pid}/root") / path.relative_to("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.communicate()


class Filler:
    """Others who leave no byte, or no inode, of a disk."""

    def __init__(self, folder: Path, *, takes_inodes: bool) -> None:
        self._folder = folder
        self._takes_inodes = takes_inodes

    def fill(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._takes_inodes:
            with suppress(OSError):
                for number in count():
                    (self._folder / str(number)).touch(exist_ok=False)
            return
        with (self._folder / "bytes").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 512):  # a large write may leave what is too little for it
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        rmtree(self._folder)


@cache
def may_mount(kind: str = TMPFS) -> bool:
    """True if this user can have such a disk on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with OwnDisk(Path(folder) / "disk", 4 << 20, kind) as disk:
                return disk.is_mounted
        except FileNotFoundError:  # no unshare
            return False
