"""Nameservers and brokers as processes of their own, each of which can be killed and come back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

from headrace import blocking
from tests.support import evidence
from tests.support.own_disk import OwnDisk
from tests.support.ports import free_port, is_open
from tests.support.processes import HEADRACE
from tests.support.until import wait_until

_UP_S = 60.0


class Daemon:
    """One process, always at the same address."""

    def __init__(
        self, folder: Path, name: str, *arguments: str, port: int, before: Sequence[str] = ()
    ) -> None:
        """before: what goes before the command, such as a program that starts it elsewhere."""
        self.address = f"127.0.0.1:{port}"
        self._port = port
        self._command = (*before, HEADRACE, *arguments)
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; it is not up yet."""
        environment = os.environ | {"PYTHONFAULTHANDLER": "1"}  # a signal that ends it says where
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        evidence.keep(self._log.stem, self._process, self._log.open("rb"))

    def kill(self) -> None:
        """End it as kill -9 does."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it in order, as SIGTERM does."""
        assert self._process
        self._process.terminate()
        try:
            code = self._process.wait(_UP_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            code = self._process.wait()
        assert code == 0, f"stopped with {code}: {self.said()}"

    def pause(self) -> None:
        """Let it do nothing, as SIGSTOP does."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        assert self._process
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process
        return self._process.poll()

    def said(self) -> str:
        """All that it has logged so far."""
        return self._log.read_text(errors="replace")

    def wait_up(self) -> None:
        """Wait until it takes connections."""

        def is_up() -> bool:
            assert self.exit_code is None, f"ended with {self.exit_code}: {self.said()}"
            return is_open(self._port)

        wait_until(is_up, self.said, _UP_S)


class Own(NamedTuple):
    """A broker's own things: a disk with its folder, and settings by key of the file."""

    name: str
    disk: OwnDisk | None = None
    settings: Mapping[str, object] = MappingProxyType({})


class Cluster:
    """Use it in a ``with`` block."""

    # How many; a subclass may have more.
    NAMESERVERS = 1

    def __init__(
        self,
        folder: Path,
        *brokers: str | Own,
        before: Sequence[str] | OwnDisk = (),
        **settings: object,
    ) -> None:
        """brokers: their names, or what each has of its own.

        before: what goes before their commands; or the disk with their folder, where they make room
        when it fills up. settings: theirs, by key of the file.
        """
        self.nameservers = [_nameserver(folder, number) for number in range(self.NAMESERVERS)]
        self.addresses = ";".join(each.address for each in self.nameservers)
        self.brokers = {}
        for each in brokers:
            own = each if isinstance(each, Own) else Own(each)
            place = own.disk or before
            # Elsewhere they keep their messages, however full the machine's disk is.
            keep = {} if isinstance(place, OwnDisk) else {"cleanFileForciblyEnable": "false"}
            command = place.command if isinstance(place, OwnDisk) else place
            lines = {**keep, **settings, **own.settings}
            self.brokers[own.name] = _broker(folder, own.name, self.addresses, lines, command)
        self._stack = ExitStack()

    @property
    def nameserver(self) -> Daemon:
        """The first or only one."""
        return self.nameservers[0]

    def __enter__(self) -> Self:
        for daemon in (*self.nameservers, *self.brokers.values()):
            self._stack.callback(daemon.kill)
            daemon.start()
            daemon.wait_up()
        self.wait_registered()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_registered(self) -> None:
        """Wait until each nameserver knows all brokers."""

        def are_registered(admin: blocking.Admin) -> bool:
            for name, broker in self.brokers.items():
                code = broker.exit_code
                assert code is None, f"{name} has ended with {code}: {broker.said()}"
            return len(admin.cluster()) >= len(self.brokers)

        for nameserver in self.nameservers:
            with blocking.Admin(nameserver=nameserver.address) as admin:
                wait_until(partial(are_registered, admin), nameserver.said, _UP_S)


def _nameserver(folder: Path, number: int) -> Daemon:
    port, name = free_port(), f"nameserver-{number}" if number else "nameserver"
    config = folder / f"{name}.conf"
    config.write_text(f"listenPort={port}\nkvConfigPath={folder / name / 'kvConfig.json'}\n")
    return Daemon(folder, name, "nameserver", "-c", str(config), port=port)


def _broker(
    folder: Path, name: str, nameservers: str, settings: dict[str, object], before: Sequence[str]
) -> Daemon:
    port = free_port()
    lines = {
        "brokerName": name,
        "listenPort": port,
        "fastListenPort": 0,
        "bindAddress": "127.0.0.1",
        "namesrvAddr": nameservers,
        "storePathRootDir": folder / name,
        "mappedFileSizeCommitLog": 32 * 1024 * 1024,
        "mappedFileSizeConsumeQueue": 20 * 10_000,
        "maxHashSlotNum": 20_000,
        "maxIndexNum": 80_000,
        **settings,
    }
    config = folder / f"{name}.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return Daemon(folder, name, "broker", "-c", str(config), port=port, before=before)
