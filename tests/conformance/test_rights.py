"""The official Java client with credentials and mqadmin's commands for users and rules.

They meet daemons that check everyone, over TLS; the suite also runs as a user with rules, and with
both header codecs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Rule, blocking
from tests.conformance.console import Console, console
from tests.conformance.peer import QUICK_JVM, driver_command
from tests.conformance.test_java_client import SETTINGS, Result, allowed, outcome
from tests.support.secured import Secured

pytestmark = [pytest.mark.conformance, pytest.mark.long]

USER, PASSWORD = "conformance", "a secret of the suite"
ROOT_PASSWORD = "hidden-root"
# What the scenarios do: also administer topics and groups of their own.
RULES = [
    Rule("Topic:*", ("Pub", "Sub", "Create", "Update", "Delete", "Get")),
    Rule("Group:*", ("Sub", "Create", "Update", "Delete", "Get")),
    Rule("Cluster:*", ("Get", "Update")),
]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp("rights")
    with Secured(home, users=True, **SETTINGS) as cluster:
        cluster.write(
            "client.properties",
            "tls.client.authServer=true",
            f"tls.client.trustCertPath={cluster.ca_file}",
        )
        with blocking.Admin(**cluster.at, user="root", password=ROOT_PASSWORD) as admin:
            admin.create_user(USER, PASSWORD)
            admin.set_rules(USER, RULES)
        yield cluster


def jvm(secured: Secured) -> tuple[str, ...]:
    return (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        f"-Dtls.config.file={secured.folder / 'client.properties'}",
    )


def tools_yml(home: Path, user: str, password: str) -> tuple[str, ...]:
    """The file of mqadmin's credentials, and the JVM's option that names it."""
    (home / "conf").mkdir()
    (home / "conf" / "tools.yml").write_text(f"accessKey: {user}\nsecretKey: {password}\n")
    return (f"-Drocketmq.home.dir={home}",)


# -- the official client ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["JSON", "ROCKETMQ"])
def suite(
    request: pytest.FixtureRequest, secured: Secured, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Result]]:
    codec: str = request.param
    home = tmp_path_factory.mktemp(codec)
    options = (
        *jvm(secured),
        *tools_yml(home, USER, PASSWORD),
        f"-Dheadrace.accessKey={USER}",
        f"-Dheadrace.secretKey={PASSWORD}",
        *QUICK_JVM,
    )
    command = driver_command("conformance.Suite", home=home, codec=codec, options=options)
    with (home / "stderr").open("w") as errors:
        run = subprocess.Popen(
            [*command, secured.nameserver], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        return codec, outcome(run)


def test_what_passes_without_users_passes_with_rules(
    suite: tuple[str, dict[str, Result]],
) -> None:
    codec, results = suite
    failed = {
        scenario: results[scenario].detail if scenario in results else "no result"
        for scenario, of in sorted(allowed())
        if of == codec
        if scenario not in results or not results[scenario].ok
    }
    assert not failed, json.dumps(failed, indent=1)


# -- mqadmin ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mqadmin(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """mqadmin as the Super user root."""
    home: Path = tmp_path_factory.mktemp("mqadmin")
    credentials = tools_yml(home, "root", ROOT_PASSWORD)
    with console(home, (*jvm(secured), *credentials)) as running:
        yield running


def ask(mqadmin: Console, secured: Secured, *command: str) -> str:
    return mqadmin.run(secured.nameserver, *command, "-c", "DefaultCluster")


def table(printed: str) -> list[list[str]]:
    """The rows of a table, without its heading."""
    lines = [line for line in printed.splitlines() if line.startswith(("#", "User:", "alice"))]
    return [line.split() for line in lines if not line.startswith("#")]


def test_mqadmin_manages_users(secured: Secured, mqadmin: Console) -> None:
    made = ask(mqadmin, secured, "createUser", "-u", "alice", "-p", "alicepw", "-t", "Normal")
    assert "create user to" in made, made
    assert "success" in made, made
    # Passwords are never given out.
    user = ["alice", "null", "Normal", "enable"]
    assert table(ask(mqadmin, secured, "getUser", "-u", "alice")) == [user]
    changed = ask(mqadmin, secured, "updateUser", "-u", "alice", "-s", "disable")
    assert "success" in changed, changed
    disabled = [*user[:3], "disable"]
    assert disabled in table(ask(mqadmin, secured, "listUser", "-f", "ali"))
    again = ask(mqadmin, secured, "createUser", "-u", "alice", "-p", "x", "-t", "Normal")
    assert "The user is existed" in again
    ask(mqadmin, secured, "updateUser", "-u", "alice", "-s", "enable")


def test_mqadmin_manages_rules(secured: Secured, mqadmin: Console) -> None:
    ask(mqadmin, secured, "createUser", "-u", "alice", "-p", "alicepw", "-t", "Normal")
    words = ("-s", "User:alice", "-r", "Topic:orders*,Group:shop", "-a", "Pub,Sub")
    made = ask(mqadmin, secured, "createAcl", *words, "-i", "127.0.0.0/8", "-d", "Allow")
    assert "success" in made, made
    topic = ["User:alice", "Custom", "Topic:orders*", "[Pub,", "Sub]", "[127.0.0.0/8]", "Allow"]
    group = [*topic[:2], "Group:shop", *topic[3:]]
    assert sorted(table(ask(mqadmin, secured, "getAcl", "-s", "User:alice"))) == [group, topic]
    changed = ask(
        mqadmin, secured, "updateAcl", *words[:2], "-r", "Group:shop", "-a", "Sub", "-d", "Deny"
    )
    assert "success" in changed, changed
    group = [*group[:3], "[Sub]", "null", "Deny"]
    assert group in table(ask(mqadmin, secured, "listAcl", "-s", "alice"))
    removed = ask(mqadmin, secured, "deleteAcl", "-s", "User:alice", "-r", "Group:shop")
    assert "success" in removed, removed
    assert table(ask(mqadmin, secured, "getAcl", "-s", "User:alice")) == [topic]
    assert "success" in ask(mqadmin, secured, "deleteUser", "-u", "alice")
    assert table(ask(mqadmin, secured, "getAcl", "-s", "User:alice")) == []


def test_what_mqadmin_prints_can_be_imported(
    secured: Secured, mqadmin: Console, tmp_path: Path
) -> None:
    ask(mqadmin, secured, "createUser", "-u", "alice", "-p", "alicepw", "-t", "Normal")
    words = ("-s", "User:alice", "-r", "Topic:orders*", "-a", "Pub,Sub", "-d", "Allow")
    ask(mqadmin, secured, "createAcl", *words)
    file = tmp_path / "acl.txt"
    file.write_text(ask(mqadmin, secured, "listUser") + ask(mqadmin, secured, "listAcl"))
    # Nobody is asked.
    done = secured.command("acl", "import", str(file), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    alice = next(row for row in json.loads(done.stdout) if row["user"] == "alice")
    assert alice["rules"] == ["Allow Pub, Sub on Topic:orders*"]
