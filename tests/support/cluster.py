"""A nameserver and brokers as processes of their own, each of which can be killed and come back."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from headrace import blocking
from tests.support.processes import HEADRACE

if TYPE_CHECKING:
    from pathlib import Path

_UP_S = 30.0


class Daemon:
    """One process, always at the same address."""

    def __init__(self, folder: Path, name: str, *arguments: str, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._arguments = arguments
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; it is not up yet."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [HEADRACE, *self._arguments], stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        """End it as kill -9 does."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def wait_up(self) -> None:
        """Wait until it takes connections."""
        until = time.monotonic() + _UP_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                assert time.monotonic() < until, self._log.read_text()
                time.sleep(0.02)
            else:
                return


class Cluster:
    """Use it in a ``with`` block."""

    def __init__(self, folder: Path, *brokers: str, **settings: object) -> None:
        """brokers: their names. settings: of all of them, by key of the file."""
        port = _free_port()
        self.nameserver = Daemon(folder, "nameserver", "nameserver", "--port", str(port), port=port)
        self.brokers = {
            name: _broker(folder, name, self.nameserver.address, settings) for name in brokers
        }
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for daemon in (self.nameserver, *self.brokers.values()):
            self._stack.callback(daemon.kill)
            daemon.start()
            daemon.wait_up()
        self.wait_registered()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_registered(self) -> None:
        """Wait until the nameserver knows all brokers."""
        until = time.monotonic() + _UP_S
        with blocking.Admin(nameserver=self.nameserver.address) as admin:
            while len(admin.cluster()) < len(self.brokers):
                assert time.monotonic() < until
                time.sleep(0.02)


def _broker(folder: Path, name: str, nameserver: str, settings: dict[str, object]) -> Daemon:
    port = _free_port()
    lines = {
        "brokerName": name,
        "listenPort": port,
        "bindAddress": "127.0.0.1",
        "namesrvAddr": nameserver,
        "storePathRootDir": folder / name,
        "mappedFileSizeCommitLog": 32 * 1024 * 1024,
        "mappedFileSizeConsumeQueue": 20 * 10_000,
        "maxHashSlotNum": 20_000,
        "maxIndexNum": 80_000,
        **settings,
    }
    config = folder / f"{name}.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return Daemon(folder, name, "broker", "-c", str(config), port=port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
