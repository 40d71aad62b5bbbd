"""A cluster with TLS as processes, as its users set it up."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.conformance.peer import free_ports
from tests.support.cluster import Daemon
from tests.support.processes import HEADRACE
from tests.support.until import wait_until


class Secured:
    """A nameserver and a broker with TLS, and the files of their clients; a context manager."""

    def __init__(
        self, folder: Path, *, users: bool = False, tls: Sequence[str] = (), **settings: object
    ) -> None:
        """users: whether it has users. tls: more lines of the file of TLS's settings.

        settings: more of the broker's, by key of the file.
        """
        self.folder = folder
        self.ca_file = str(folder / "certificates/ca.pem")
        port = free_ports(4)
        self.nameserver, self.broker = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
        self.command("cert", "make-ca")
        self.command("cert", "issue", "server", "127.0.0.1")
        certificates = folder / "certificates"
        self.write(
            "tls.properties",
            f"tls.server.certPath={certificates}/server.pem",
            f"tls.server.keyPath={certificates}/server.key",
            f"tls.client.trustCertPath={self.ca_file}",
            *tls,
        )
        shared = ["bindAddress=127.0.0.1", "tlsConfigFile=tls.properties"]
        if users:
            shared += self._users()
        self.write("nameserver.conf", f"listenPort={port}", "kvConfigPath=kvConfig.json", *shared)
        self.write(
            "broker.conf",
            f"listenPort={port + 1}",
            f"monitorPort={port + 2}",
            "fastListenPort=0",
            "brokerName=broker-a",
            f"namesrvAddr={self.nameserver}",
            "storePathRootDir=store",
            *(f"{key}={value}" for key, value in settings.items()),
            *shared,
        )
        # Arguments of clients.
        self.at: Any = {"nameserver": self.nameserver, "ca_file": self.ca_file}
        self.monitor = f"127.0.0.1:{port + 2}"
        # Of a daemon that a test adds.
        self.free_port = port + 3
        self.daemons = [
            self.daemon(kind, kind, port + number)
            for number, kind in enumerate(("nameserver", "broker"))
        ]

    def daemon(self, kind: str, name: str, port: int) -> Daemon:
        """A daemon with the settings of the file NAME.conf."""
        inside = ("env", f"--chdir={self.folder}")
        return Daemon(self.folder, name, kind, "-c", f"{name}.conf", port=port, before=inside)

    def _users(self) -> list[str]:
        """The settings of both daemons, with a Super user, and one for the daemons themselves."""
        self.write("super.json", '{"username":"root","password":"hidden-root"}')
        self.write("inner.json", '{"accessKey":"daemons","secretKey":"hidden-inner"}')
        for name in ("super.json", "inner.json"):
            (self.folder / name).chmod(0o600)
        return [
            "authenticationEnabled=true",
            "authorizationEnabled=true",
            "initAuthenticationUserFile=super.json",
            "innerClientAuthenticationCredentialsFile=inner.json",
        ]

    def __enter__(self) -> Self:
        for daemon in self.daemons:
            daemon.start()
            daemon.wait_up()
        wait_until(lambda: '"event": "registered"' in self.daemons[-1].said())
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.stop()

    def write(self, name: str, *lines: str) -> None:
        """A file of these lines in the folder."""
        (self.folder / name).write_text("\n".join(lines) + "\n")

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A ``headrace`` command of a user whose files are in the folder."""
        return subprocess.run(
            [HEADRACE, *arguments],
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            env={"XDG_CONFIG_HOME": str(self.folder), "PATH": "/usr/bin:/bin"},
        )
