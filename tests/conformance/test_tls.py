"""The official Java client and mqadmin over TLS, against daemons that require it."""

from __future__ import annotations

import subprocess

import pytest

from tests.conformance.peer import QUICK_JVM, driver_command
from tests.conformance.test_java_client import SETTINGS, Result, allowed, outcome
from tests.support.secured import Secured

pytestmark = [pytest.mark.conformance, pytest.mark.long]

CODEC = "JSON"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every scenario, run by one JVM that verifies the certificates of both daemons."""
    home = tmp_path_factory.mktemp("java_tls")
    with Secured(home, users=False, **SETTINGS) as cluster, (home / "stderr").open("w") as errors:
        cluster.write(
            "client.properties",
            "tls.client.authServer=true",
            f"tls.client.trustCertPath={cluster.ca_file}",
        )
        options = (
            "-Dtls.enable=true",
            "-Dtls.test.mode.enable=false",
            f"-Dtls.config.file={home / 'client.properties'}",
            *QUICK_JVM,
        )
        command = driver_command("conformance.Suite", home=home, codec=CODEC, options=options)
        run = subprocess.Popen(
            [*command, cluster.nameserver], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        return outcome(run)


@pytest.mark.parametrize("scenario", sorted(name for name, codec in allowed() if codec == CODEC))
def test_what_passes_without_tls_passes_with_it(scenario: str, results: dict[str, Result]) -> None:
    result = results.get(scenario, Result(ok=False, detail="no result"))
    assert result.ok, result.detail
