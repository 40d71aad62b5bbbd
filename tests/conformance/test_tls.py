"""The official Java client and mqadmin over TLS, against daemons in each mode of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace import Message, blocking
from tests.conformance.console import Console, console
from tests.conformance.peer import QUICK_JVM, driver_command
from tests.conformance.test_java_client import SETTINGS, Result, allowed, outcome
from tests.support.processes import HEADRACE
from tests.support.secured import Secured
from tests.support.until import wait_until

pytestmark = [pytest.mark.conformance, pytest.mark.long]

CODEC = "JSON"
# The clients that each mode serves. require: enforcing, with certificates of clients.
SERVED = {
    "disabled": {"plain"},
    "permissive": {"plain", "TLS", "certificate"},
    "enforcing": {"TLS", "certificate"},
    "require": {"certificate"},
}
CLIENTS = ("plain", "TLS", "certificate")


def client_jvm(file: Path) -> tuple[str, ...]:
    """The JVM's options that name the file of the client's settings of TLS."""
    return (
        "-Dtls.enable=true",
        "-Dtls.test.mode.enable=false",
        f"-Dtls.config.file={file}",
    )


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
        options = (*client_jvm(home / "client.properties"), *QUICK_JVM)
        command = driver_command("conformance.Suite", home=home, codec=CODEC, options=options)
        run = subprocess.Popen(
            [*command, cluster.nameserver], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        return outcome(run)


@pytest.mark.parametrize("scenario", sorted(name for name, codec in allowed() if codec == CODEC))
def test_what_passes_without_tls_passes_with_it(scenario: str, results: dict[str, Result]) -> None:
    result = results.get(scenario, Result(ok=False, detail="no result"))
    assert result.ok, result.detail


# -- modes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, and with a certificate that it has issued for a client."""
    folder = tmp_path_factory.mktemp("authority")
    for arguments in (("make-ca",), ("issue", "client", "a-client")):
        subprocess.run([HEADRACE, "cert", *arguments], cwd=folder, check=True, capture_output=True)
    return folder / "certificates"


@pytest.fixture(scope="module")
def consoles(
    authority: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Console]]:
    """A JVM for each kind of client, which does not verify the daemons' own authorities."""
    certificate = {"certPath": authority / "client.pem", "keyPath": authority / "client.key"}
    lines = {"plain": None, "TLS": {}, "certificate": certificate}
    with ExitStack() as stack:
        found = {}
        for name, settings in lines.items():
            home = tmp_path_factory.mktemp(name)
            options: tuple[str, ...] = ()
            if settings is not None:
                file = home / "client.properties"
                file.write_text("".join(f"tls.client.{k}={v}\n" for k, v in settings.items()))
                options = client_jvm(file)
            found[name] = stack.enter_context(console(home, options))
        yield found


@pytest.fixture(scope="module", params=list(SERVED))
def moded(
    request: pytest.FixtureRequest, authority: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Secured]]:
    mode: str = request.param
    lines = [f"tls.server.mode={'enforcing' if mode == 'require' else mode}"]
    if mode == "require":
        lines += [
            "tls.server.need.client.auth=require",
            f"tls.server.trustCertPath={authority / 'ca.pem'}",
            f"tls.client.certPath={authority / 'client.pem'}",
            f"tls.client.keyPath={authority / 'client.key'}",
        ]
    with Secured(tmp_path_factory.mktemp(mode), tls=lines) as cluster:
        yield mode, cluster


@pytest.mark.parametrize("client", CLIENTS)
def test_each_mode_serves_its_clients(
    moded: tuple[str, Secured], client: str, authority: Path, consoles: dict[str, Console]
) -> None:
    mode, cluster = moded
    jvm, nameserver, topic = consoles[client], cluster.nameserver, f"Of_{client}"
    made = jvm.run(nameserver, "updateTopic", "-c", "DefaultCluster", "-t", topic)
    assert ("create topic to 127.0.0.1" in made) == (client in SERVED[mode]), made
    if client not in SERVED[mode]:
        return
    member = jvm.join(nameserver, f"G_{client}", topic, "averagely")
    tls = {
        **cluster.at,
        "cert_file": str(authority / "client.pem"),
        "key_file": str(authority / "client.key"),
    }
    at = {"nameserver": nameserver} if mode == "disabled" else tls
    with blocking.Producer(**at) as producer:
        producer.send(Message(topic, b"a message"))
    wait_until(lambda: jvm.received(member) == ["a message"])
    jvm.leave(member)
