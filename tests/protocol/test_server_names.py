"""Names that the certificates of servers may have."""

from __future__ import annotations

import pickle

import pytest

from headrace_protocol.bodies import BrokerData
from headrace_protocol.tls.names import ServerNames
from headrace_protocol.tls.settings import ClientTls

TLS = ClientTls()
AT, OTHER = "10.0.0.5:10911", "[2001:db8::5]:10911"


@pytest.fixture
def names() -> ServerNames:
    found = ServerNames()
    broker = BrokerData(cluster="c", broker_name="broker-a", broker_addrs={0: AT, 1: OTHER})
    found.learn([broker])
    return found


def test_a_broker_at_an_ip_may_have_its_own_name(names: ServerNames) -> None:
    assert names.of(TLS, AT) == ("10.0.0.5", "broker-a.c")
    assert names.of(TLS, OTHER) == ("2001:db8::5", "broker-a.c")
    assert names.of(TLS, "10.0.0.6:10911") == ("10.0.0.6",)
    assert names.of(TLS._replace(server_name="x.org"), AT) == ("x.org",)
    names.put("host:1", "broker-a", "c")
    assert names.of(TLS, "host:1") == ("host",)


def test_the_proved_name_comes_first_until_another_broker_is_there(names: ServerNames) -> None:
    names.proved(AT, "broker-a.c")
    assert names.of(TLS, AT) == ("broker-a.c", "10.0.0.5")
    assert pickle.loads(pickle.dumps(names)).of(TLS, AT) == ("broker-a.c", "10.0.0.5")
    names.put(AT, "broker-b", "c")
    assert names.of(TLS, AT) == ("10.0.0.5", "broker-b.c")
    names.proved(AT, "broker-b.c")
    names.proved(AT, "10.0.0.5")
    assert names.of(TLS, AT) == ("10.0.0.5", "broker-b.c")


@pytest.mark.parametrize(
    ("broker", "cluster"),
    [("", "c"), ("a", ""), ("a..b", "c"), ("*", "c"), ("a b", "c"), ("ü", "c"), ("x" * 64, "c")],
)
def test_what_no_certificate_has_is_not_looked_for(
    names: ServerNames, broker: str, cluster: str
) -> None:
    names.put(AT, broker, cluster)
    assert f"{broker}.{cluster}" not in names.of(TLS, AT)


def test_what_is_known_is_bounded(names: ServerNames) -> None:
    for number in range(20_000):
        names.put(f"10.1.{number // 256}.{number % 256}:1", f"b{number}", "c")
    assert names.of(TLS, AT) == ("10.0.0.5",)
    assert names.of(TLS, "10.1.78.31:1") == ("10.1.78.31", "b19999.c")
