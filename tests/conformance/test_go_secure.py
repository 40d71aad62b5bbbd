"""Apache's client-go with credentials, plain and over TLS, against daemons that check everyone.

TLS is in no release of client-go yet: what needs it runs with the newest commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace import Rule, blocking
from tests.conformance import test_go_client as without_users
from tests.conformance.go_client import go_failure
from tests.conformance.test_go_client import SETTINGS, Case
from tests.support.secured import Secured

pytestmark = [pytest.mark.conformance, pytest.mark.long]

USER, PASSWORD = "gopher", "a secret of client-go"
RULES = [Rule("Topic:T_*", ("Pub", "Sub")), Rule("Group:G_*", ("Sub", "Create"))]
# The connections that each mode accepts.
ACCEPTED = {
    "disabled": {"plain"},
    "permissive": {"plain", "TLS"},
    "enforcing": {"TLS"},
}
CONNECTIONS = ["plain", "TLS"]


class Lab(NamedTuple):
    """A running cluster in a mode of TLS, with a user who has rules."""

    mode: str
    cluster: Secured

    def case(self, home: Path, connection: str, password: str = PASSWORD) -> Case:
        options = {"user": USER, "password": password, "tls": connection == "TLS"}
        return Case.made(self.cluster.nameserver, home, self.root(), **options)

    @property
    def connection(self) -> str:
        """One that is accepted."""
        return "TLS" if self.mode == "enforcing" else "plain"

    def root(self) -> dict[str, Any]:
        """Arguments of our clients of the Super user."""
        at = dict(self.cluster.at)
        if self.mode == "disabled":
            del at["ca_file"]
        return {**at, "user": "root", "password": "hidden-root"}


@pytest.fixture(scope="module", params=list(ACCEPTED))
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    mode: str = request.param
    tls = (f"tls.server.mode={mode}",)
    with Secured(tmp_path_factory.mktemp(mode), users=True, tls=tls, **SETTINGS) as cluster:
        lab = Lab(mode, cluster)
        with blocking.Admin(**lab.root()) as admin:
            admin.create_user(USER, PASSWORD)
            admin.set_rules(USER, RULES)
        yield lab


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_each_mode_serves_its_connections(lab: Lab, connection: str, tmp_path: Path) -> None:
    case = lab.case(tmp_path, connection)
    if connection in ACCEPTED[lab.mode]:
        without_users.test_simple(case)
    else:
        assert refused(case)


def refused(case: Case, topic: str = "") -> str:
    """The errors of a send that fails. topic: another than the case's."""
    options = {"group": case.group, "topic": topic or case.topic, "bodies": ["x"], **case.options}
    return go_failure("send", case.nameserver, case.home, **options)


@pytest.mark.parametrize(
    "passes",
    [
        without_users.test_transaction,
        without_users.test_retry_later,
        without_users.test_dead_letters,
        without_users.test_retry_in_order,
        without_users.test_orderly_hand_over,
        without_users.test_broadcast,
    ],
)
def test_what_passes_without_users_passes_with_them(
    lab: Lab, passes: Callable[[Case], None], tmp_path: Path
) -> None:
    passes(lab.case(tmp_path, lab.connection))


def test_a_wrong_password_and_a_topic_without_rules_are_refused(lab: Lab, tmp_path: Path) -> None:
    stranger = lab.case(tmp_path, lab.connection, password="a wrong one")
    assert "check signature failed" in refused(stranger)
    with blocking.Admin(**lab.root()) as admin:
        admin.create_topic("Salaries")
    errors = refused(lab.case(tmp_path, lab.connection), "Salaries")
    assert "User:gopher has no permission to access Topic:Salaries" in errors
