"""The cost of TLS, of users with rules, and of our log-ins.

Each round starts one set-up after the other: headrace open, with users and with TLS, and Apache
RocketMQ with users. The official Java client, which signs requests, and headrace's own, which logs
in, drive them in the same order.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.bench.clients.job import Job
from tests.bench.load import SENDS, Load, loaded, say
from tests.bench.options import option_parser
from tests.bench.results import keep, stamp
from tests.bench.table import rows_as_table, spread
from tests.conformance.probe import create_user
from tests.support.processes import HEADRACE

BODY_BYTES = 1024
JOB_TIMEOUT_S = 300
ROOT_USER = ("root", "a password of root")
USER = ("bench", "a password of bench")
RULES = {"Topic:*": ["Pub", "Sub", "Create", "Get"], "Group:*": ["Sub", "Create", "Get"]}
INIT_USER = json.dumps({"username": ROOT_USER[0], "password": ROOT_USER[1]})
INNER = '{"accessKey":"inner","secretKey":"a password of brokers"}'
AUTH = "org.apache.rocketmq.auth"
SIGNED = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "initAuthenticationUser": INIT_USER,
    "innerClientAuthenticationCredentials": INNER,
    "authenticationProvider": f"{AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{AUTH}.authentication.provider"
    ".LocalAuthenticationMetadataProvider",
    "authorizationProvider": f"{AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{AUTH}.authorization.provider"
    ".LocalAuthorizationMetadataProvider",
}
SIGNER_OPTIONS = (f"-Dbench.user={USER[0]}", f"-Dbench.password={USER[1]}")
JAVA = ("async-1000", "batch-100")
PYTHON = ("pipeline", "send-many-bytes")


class SetUp(NamedTuple):
    """How daemons and clients are set up. python: the works of our client."""

    peer: str
    settings: Mapping[str, str]
    nameserver_settings: Mapping[str, str]
    options: Sequence[str]
    environment: Mapping[str, str]
    python: Sequence[str] = PYTHON

    @property
    def has_users(self) -> bool:
        return "authenticationEnabled" in self.settings


def set_ups(home: Path) -> dict[str, SetUp]:
    """All of them, by name; makes certificates in ``home``."""
    for arguments in (("make-ca",), ("issue", "server", "127.0.0.1")):
        subprocess.run([HEADRACE, "cert", *arguments], cwd=home, check=True, capture_output=True)
    certificates = home / "certificates"
    tls = home / "tls.properties"
    tls.write_text(
        f"tls.server.mode=permissive\ntls.server.certPath={certificates}/server.pem\n"
        f"tls.server.keyPath={certificates}/server.key\n"
    )
    client = home / "client.properties"
    client.write_text(
        f"tls.client.authServer=true\ntls.client.trustCertPath={certificates}/ca.pem\n"
    )
    over_tls = (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        f"-Dtls.config.file={client}",
    )
    with_tls = {"tlsConfigFile": str(tls)}
    signed = {**SIGNED, "authRequiresTls": "none"}
    user = {"HEADRACE_USER": USER[0], "HEADRACE_PASSWORD": USER[1]}
    return {
        "open": SetUp("headrace", {}, {}, (), {}),
        "users": SetUp("headrace", signed, {}, SIGNER_OPTIONS, user),
        "TLS": SetUp(
            "headrace",
            with_tls,
            with_tls,
            over_tls,
            {"HEADRACE_TLS_CA": str(certificates / "ca.pem")},
        ),
        "Apache, users": SetUp("apache", SIGNED, {}, SIGNER_OPTIONS, {}, python=()),
    }


@dataclass(frozen=True)
class Length:
    """The length of a run. messages: of a Python client, by work."""

    rounds: int
    seconds: float
    messages: Mapping[str, int]


FULL = Length(3, 5, {"pipeline": 400_000, "send-many-bytes": 1_200_000})
SHORT = Length(1, 2, {"pipeline": 100_000, "send-many-bytes": 300_000})


class Bar(NamedTuple):
    """The least rate of a set-up, divided by that of another."""

    set_up: str
    other: str
    works: Sequence[str]
    ratio: float


BARS = (
    Bar("users", "open", JAVA, 0.6),
    Bar("users", "Apache, users", JAVA, 1.3),
    Bar("users", "open", PYTHON, 0.97),
    Bar("TLS", "open", JAVA, 0.6),
)

# Reports of each round, by set-up and work.
Reports = dict[str, dict[str, list[dict[str, float]]]]


@dataclass
class Round:
    """One set-up, from its start to its end."""

    name: str
    set_up: SetUp
    length: Length
    reports: Reports = field(repr=False)

    def run(self, directory: Path) -> None:
        with self._loaded(directory) as load:
            if self.set_up.has_users:
                create_user(load.peer.broker, USER, RULES, ROOT_USER)
            # They send fixed numbers of messages, so all begin at the same places of the log: a
            # broker that has to make room in a new file is slower.
            for work in self.set_up.python:
                self._add(work, self._python(work, load))
            load.warm_up(self.length.seconds / 2, BODY_BYTES)
            for work in JAVA:
                seconds = self.length.seconds
                self._add(work, load.job(SENDS[work], "BENCH", BODY_BYTES, seconds=seconds))

    def _loaded(self, directory: Path) -> contextlib.AbstractContextManager[Load]:
        peer, settings, nameserver_settings, options, *_ = self.set_up
        return loaded(
            peer,
            directory,
            settings=settings,
            nameserver_settings=nameserver_settings,
            options=options,
            signer=ROOT_USER if self.set_up.has_users else None,
        )

    def _python(self, work: str, load: Load) -> dict[str, float]:
        count = self.length.messages[work]
        peer = load.peer
        job = Job(work, peer.nameserver, peer.broker_pid, work, BODY_BYTES, count, count // 4)
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.clients.run", msgspec.json.encode(job).decode()],
            env={**os.environ, **self.set_up.environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=JOB_TIMEOUT_S,
        )
        report: dict[str, float] = msgspec.json.decode(done.stdout)
        return report

    def _add(self, work: str, report: dict[str, float]) -> None:
        self.reports.setdefault(self.name, {}).setdefault(work, []).append(report)
        say(
            f"{self.name:18} {work:16} {report['rate']:>10,.0f}/s  "
            f"broker {report['broker_cpu_us']:6.2f} µs"
        )


def measure(length: Length, chosen: Mapping[str, SetUp], directory: Path) -> dict[str, Any]:
    """All figures: a report for each round, by set-up and work."""
    reports: Reports = {}
    for number in range(length.rounds):
        for name, set_up in chosen.items():
            say(f"round {number + 1} of {length.rounds}: {name}")
            Round(name, set_up, length, reports).run(directory)
    return {**stamp(), "rounds": length.rounds, "set_ups": reports}


def markdown(results: dict[str, Any]) -> str:
    """The tables of the document."""
    reports: Reports = results["set_ups"]
    rows = [
        [
            name,
            work,
            *(spread([report[key] for report in found], 1, digits) for key, digits in KEYS),
        ]
        for name, works in reports.items()
        for work, found in works.items()
    ]
    title = f"{results['date']}, {results['machine']}, medians of {results['rounds']} rounds"
    columns = ["set-up", "work, 1 KiB", "messages/s", "broker CPU, µs/message"]
    bars = rows_as_table(["set-up", "beside", "work", "ratio", "bar", ""], list(_bars(reports)))
    return f"{title}\n\n{bars}\n{rows_as_table(columns, rows)}"


KEYS = (("rate", 0), ("broker_cpu_us", 2))


def _bars(reports: Reports) -> Iterator[list[str]]:
    for set_up, other, works, least in BARS:
        for work in works:
            rates = [
                statistics.median(report["rate"] for report in reports[name][work])
                for name in (set_up, other)
                if work in reports.get(name, {})
            ]
            if len(rates) == 2:
                ratio = rates[0] / rates[1]
                verdict = "met" if ratio >= least else "**missed**"
                yield [set_up, other, work, f"{ratio:.2f}", f"≥ {least:g}", verdict]


def main(options: list[str]) -> None:
    parser = option_parser("secure", __doc__)
    parser.add_argument("--short", action="store_true", help="one round, some 2 minutes")
    parser.add_argument("--only", nargs="+", metavar="SET-UP")
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        found = set_ups(Path(directory))
        if unknown := set(chosen.only or ()) - found.keys():
            parser.error(f"no set-up {min(unknown)!r}: choose from {', '.join(found)}")
        only = {name: found[name] for name in chosen.only or found}
        results = measure(SHORT if chosen.short else FULL, only, Path(directory))
    table = markdown(results)
    sys.stdout.write(table)
    if chosen.keep:
        keep("secure", results, table)
