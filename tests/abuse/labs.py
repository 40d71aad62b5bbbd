"""The daemons that a run attacks: open, or with users, rules, TLS, audit logs and quotas."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import Rule
from headrace.blocking import Admin
from headrace_protocol.quotas import Quota
from tests.abuse.doors import OPEN, Door
from tests.support.cluster import Cluster, Daemon
from tests.support.secured import Secured

BROKER = "innocent"
# What attackers may, so that their requests reach the functions.
RULES = [Rule(f"{kind}:*", ("All",)) for kind in ("Topic", "Group", "Cluster")]
# Each attacker is a host of its own: handshakes are counted by host.
SOURCES = tuple(f"127.0.0.{number}" for number in range(2, 10))
AUDIT_LOG = "audit.log"
SMALL_FILES: Any = {
    "mappedFileSizeCommitLog": 32 * 1024 * 1024,
    "mappedFileSizeConsumeQueue": 20 * 10_000,
    "maxHashSlotNum": 20_000,
    "maxIndexNum": 80_000,
    "cleanFileForciblyEnable": "false",
}


@dataclass(frozen=True)
class Lab:
    """Running daemons. innocent, attackers: how they connect. at: arguments of our clients.

    sources: addresses of the attackers. problems: of the daemons after the attacks.
    """

    nameserver: Daemon
    broker: Daemon
    innocent: Door = OPEN
    attackers: Door = OPEN
    at: dict[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = (OPEN.source,)
    problems: Callable[[], list[str]] = list

    @property
    def daemons(self) -> dict[str, Daemon]:
        return {"nameserver": self.nameserver, "broker": self.broker}

    def runtime_info(self) -> dict[str, str]:
        with Admin(**self.at) as admin:
            info: dict[str, str] = admin.runtime_info(self.broker.address)
        return info


@contextmanager
def open_lab(folder: Path) -> Iterator[Lab]:
    """Daemons that serve everyone."""
    with Cluster(folder, BROKER) as cluster:
        at = {"nameserver": cluster.nameserver.address}
        yield Lab(cluster.nameserver, cluster.brokers[BROKER], at=at)


@contextmanager
def secured_lab(folder: Path) -> Iterator[Lab]:
    """Daemons with everything on; the attackers are a user with rights to everything.

    They stop in order at the end.
    """
    cluster = Secured(folder, users=True, auditLogPath=AUDIT_LOG, **SMALL_FILES)
    with (folder / "nameserver.conf").open("a") as settings:
        settings.write(f"auditLogPath=nameserver-{AUDIT_LOG}\n")
    with cluster:
        at = {**cluster.at, "user": "root", "password": "hidden-root"}
        doors = {}
        with Admin(**at) as admin:
            for name in ("innocent", "attackers"):
                password = secrets.token_hex(16)
                admin.create_user(name, password)
                admin.set_rules(name, RULES)
                doors[name] = Door(cluster.ca_file, name, password)
            admin.set_quota(Quota(of="user", name="attackers", bytes_in=200e6, connections=100))
            admin.set_quota(Quota(of="topic", name="Alive", bytes_in=100e6))
        nameserver, broker = cluster.daemons
        yield Lab(nameserver, broker, **doors, at=at, sources=SOURCES,
                  problems=lambda: bad_audit_logs(cluster))  # fmt: skip


def bad_audit_logs(cluster: Secured) -> list[str]:
    """The audit logs whose chains are broken, with the reason."""
    logs = sorted(cluster.folder.glob(f"*{AUDIT_LOG}"))
    assert len(logs) == len(cluster.daemons), logs
    checks = {log.name: cluster.command("audit", "verify", str(log)) for log in logs}
    return [f"{name}: {check.stderr}" for name, check in checks.items() if check.returncode]


LABS = {"open": open_lab, "secured": secured_lab}
