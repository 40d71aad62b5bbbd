"""The official Java client with credentials and mqadmin's commands for users and rules.

They meet daemons that check everyone, over TLS; the suite also runs as a user with rules, and with
both header codecs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Message, Rule, blocking
from headrace.errors import AccessDenied
from tests.conformance.console import Console, console
from tests.conformance.peer import QUICK_JVM, driver_command, quick_peer
from tests.conformance.test_java_client import SETTINGS, Result, allowed, outcome
from tests.conformance.test_users import SETTINGS as APACHE_USERS
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
    with Secured(home, users=True, authExportEnable=True, **SETTINGS) as cluster:
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
    # To a Super user over TLS, since authExportEnable is on.
    user = ["alice", "alicepw", "Normal", "enable"]
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


def copy(mqadmin: Console, secured: Secured, source: str, target: str, user: str) -> str:
    """What the copies of a user and of its rules print."""
    between = ("-f", source, "-t", target)
    users = mqadmin.run(secured.nameserver, "copyUser", *between, "-u", user)
    return users + mqadmin.run(secured.nameserver, "copyAcl", *between, "-s", f"User:{user}")


def may_send(secured: Secured, user: str, password: str, topic: str) -> bool:
    """True if it may at both daemons: the nameserver gives it the route."""
    with blocking.Admin(**secured.at, user="root", password=ROOT_PASSWORD) as admin:
        admin.create_topic(topic, queues=1, if_not_exists=True)
    with blocking.Producer(**secured.at, user=user, password=password) as producer:
        try:
            producer.send(Message(topic, b"allowed"))
        except AccessDenied:
            return False
    return True


def test_mqadmin_copies_users_and_rules(secured: Secured, mqadmin: Console) -> None:
    # mqadmin makes users at brokers only: this one at the nameserver is a copy.
    ask(mqadmin, secured, "createUser", "-u", "bob", "-p", "bob's password", "-t", "Normal")
    words = ("-s", "User:bob", "-r", "Topic:Copied", "-a", "Pub", "-d", "Allow")
    ask(mqadmin, secured, "createAcl", *words)
    assert not may_send(secured, "bob", "bob's password", "Copied")
    printed = copy(mqadmin, secured, secured.broker, secured.nameserver, "bob")
    assert printed.count("success") == 2, printed
    assert may_send(secured, "bob", "bob's password", "Copied")
    assert not may_send(secured, "bob", "bob's password", "Salaries")


def test_a_daemon_that_keeps_its_passwords_is_no_source_of_copies(
    secured: Secured, mqadmin: Console
) -> None:
    made = mqadmin.run(
        secured.nameserver,
        *("createUser", "-b", secured.nameserver),
        *("-u", "carol", "-p", "carol's password", "-t", "Normal"),
    )
    assert "success" in made, made
    printed = copy(mqadmin, secured, secured.nameserver, secured.broker, "carol")
    assert "password can not be blank" in printed, printed
    assert "carol" not in ask(mqadmin, secured, "listUser")


def test_mqadmin_copies_users_and_rules_of_an_apache_broker(
    secured: Secured, mqadmin: Console, tmp_path: Path
) -> None:
    root = json.dumps({"username": "root", "password": ROOT_PASSWORD})
    settings = {**APACHE_USERS, "initAuthenticationUser": root}
    with quick_peer("apache", settings=settings) as apache:
        at: Any = {"nameserver": apache.nameserver, "user": "root", "password": ROOT_PASSWORD}
        with blocking.Admin(**at) as admin:
            admin.create_user("dave", "dave's password")
            admin.set_rules("dave", [Rule("Topic:Moved", ("Pub",))])
        # Its own certificate is one that nobody can verify.
        options = ("-Dtls.enable=true", *tools_yml(tmp_path, "root", ROOT_PASSWORD))
        with console(tmp_path, options) as unverified:
            for target in (secured.broker, secured.nameserver):
                printed = copy(unverified, secured, apache.broker, target, "dave")
                assert printed.count("success") == 2, printed
    assert may_send(secured, "dave", "dave's password", "Moved")


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
