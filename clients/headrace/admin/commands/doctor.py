"""``headrace doctor``: checks that every server is up and is what it should be."""

from __future__ import annotations

import sys
from ipaddress import ip_address
from typing import TYPE_CHECKING

from headrace.admin import options
from headrace.admin.health import (
    Check,
    broker_checks,
    certificate_checks,
    departed_checks,
    rights_checks,
)
from headrace.admin.output import print_rows
from headrace.admin.running import run_admin
from headrace.errors import HeadraceError
from headrace.values import now_ms
from headrace_daemon.command import FAILED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from headrace.admin.client import Admin
    from headrace.admin.probe import Finding, Role
    from headrace.admin.requests import BrokerProblem
    from headrace_protocol.bodies import BrokerData, ClusterInfo
    from headrace_protocol.departed import ClusterInfoHeader, DepartedBroker
    from headrace_protocol.drivers.response import Response
    from headrace_protocol.tls.names import ServerNames
    from headrace_protocol.tls.settings import ClientTls

    # The answer of the server at an address to a request by its code. Raises HeadraceError.
    Ask = Callable[[str, int, ClusterInfoHeader | None], Awaitable[Response]]


@options.command(
    "doctor",
    "headrace doctor",
    "headrace doctor --json -n 'ns-1:9876;ns-2:9876'",
)
@options.answer
def command(*, as_json: bool, nameserver: str | None) -> None:
    """Check that every server is up and is what it should be.

    Connects to each nameserver and each registered broker, and reports failures with reasons.

    Each thing that is wrong with a broker is a row of its own: its store refuses sends, its disk is
    full soon, its tier fails, its clock differs, a group's queues are not pulled; and a broker that
    left, with the topics and groups that miss it, and a user that brokers know differently.

    If a different server listens on a port, its protocol is named: HTTP, HTTP/2 or TLS. The exit
    code is 1 if there is any problem.
    """
    import trio

    checks = trio.run(_diagnose, nameserver)
    if any(check.role == "broker" and check.problem is None for check in checks):
        checks += run_admin(compare_rights, nameserver)
    rows = [
        {
            "role": check.role,
            "name": check.name,
            "address": check.address,
            "ok": check.problem is None,
            "problem": check.problem,
        }
        for check in checks
    ]
    print_rows(rows, as_json=as_json, empty="nothing to check")
    if any(check.problem for check in checks):
        sys.exit(FAILED)


async def _diagnose(nameserver: str | None) -> list[Check]:
    from headrace.config import resolve_nameservers, resolve_tls
    from headrace.instance import ClientInstance

    client = ClientInstance(nameserver)
    await client.start()
    try:
        addresses, tls = resolve_nameservers(nameserver), resolve_tls({}, nameserver)
        return await diagnose(addresses, tls, ask=client.request)
    finally:
        await client.stop()


async def diagnose(
    nameservers: Sequence[str],
    tls: ClientTls | None = None,
    wall_ms: Callable[[], int] = now_ms,
    ask: Ask | None = None,
) -> list[Check]:
    """Check each nameserver and all brokers that they know.

    wall_ms: this machine's clock. ask: as the user, servers that serve users only.
    """
    from headrace.admin.probe import Role
    from headrace.tasks import gather
    from headrace_protocol.tls.names import ServerNames

    async def examine(address: str, role: Role) -> Finding:
        return await _examine(address, role, tls, names, ask)

    names = ServerNames()
    checks: list[Check] = []
    clusters: dict[str, ClusterInfo] = {}
    for address in nameservers:
        problem, body, expires_s, *_ = await examine(address, Role.NAMESERVER)
        problem = problem or _nameserver_problem(address, body, clusters)
        checks.append(Check("nameserver", "-", address, problem))
        checks += certificate_checks("-", address, expires_s, wall_ms())
    for cluster in clusters.values():
        names.learn(cluster.broker_addr_table.values())
    brokers = {
        (broker.broker_name, broker_id, address): loopback
        for nameserver, cluster in clusters.items()
        for broker, broker_id, address, loopback in _brokers(cluster, nameserver)
    }
    live = {address for _, _, address in brokers}
    left = _left(clusters.values())

    async def check(node_at: tuple[str, int, str]) -> list[Check]:
        name, broker_id, address = node_at
        problem, body, expires_s, *_ = await examine(address, Role.BROKER)
        node = f"{name}:{broker_id}"
        problem, found = (
            (problem, []) if problem else _broker_problems(node, address, body, wall_ms())
        )
        found += certificate_checks(node, address, expires_s, wall_ms())
        return [Check("broker", node, address, problem or brokers[node_at]), *found]

    async def check_left(broker: DepartedBroker) -> list[Check]:
        """Also a broker that runs and doesn't register, which its store may be the reason for."""
        name, address = broker.broker_name, broker.broker_addr
        found = departed_checks(broker)
        if address and address not in live:
            problem, body, *_ = await examine(address, Role.BROKER)
            found += [] if problem else _broker_problems(name, address, body, wall_ms())[1]
        return found

    for each in [*await gather(check, sorted(brokers)), *await gather(check_left, left)]:
        checks += each if isinstance(each, list) else []
    return checks


async def _examine(
    address: str, role: Role, tls: ClientTls | None, names: ServerNames, ask: Ask | None
) -> Finding:
    """The finding of the probe, or as the user where it is denied."""
    from headrace.admin.probe import examine

    found = await examine(address, role, tls)
    if tls is not None and found.is_of_another:
        *_, own = names.of(tls, address)
        found = await examine(address, role, tls._replace(server_name=own))
    if ask is None or not found.is_denied:
        return found
    try:
        response = (await ask(address, role.value, role.header)).expect()
    except HeadraceError as error:
        return found._replace(problem=str(error))
    return found._replace(problem=None, body=bytes(response.body))


async def compare_rights(admin: Admin) -> list[Check]:
    """The users and rules that differ between daemons, as far as this user may see them."""
    problems: list[BrokerProblem] = []
    try:
        users = await admin.users(problems=problems)
        rules = await admin.rules(problems=problems)
    except HeadraceError:  # none answers, which other rows say, or may be asked by this user
        return []
    return rights_checks(users, rules)


def _broker_problems(
    node: str, address: str, body: bytes, now_ms: int
) -> tuple[str | None, list[Check]]:
    """The problem with a broker's runtime information itself, and those that it shows."""
    from headrace_protocol.bodies import KVTable

    try:
        info = KVTable.decode(body).table
    except ValueError as error:
        return f"its runtime information is malformed: {error}", []
    return None, broker_checks(node, address, info, now_ms)


def _left(clusters: Iterable[ClusterInfo]) -> list[DepartedBroker]:
    """The brokers that left and are registered nowhere."""
    seen = list(clusters)
    live = {name for cluster in seen for name in cluster.broker_addr_table}
    left = {each.broker_name: each for cluster in seen for each in cluster.departed_brokers or []}
    return [left[name] for name in sorted(left.keys() - live)]


def _nameserver_problem(address: str, body: bytes, clusters: dict[str, ClusterInfo]) -> str | None:
    """The problem with a nameserver's response, if any; adds a valid response to ``clusters``."""
    from headrace_protocol.bodies import ClusterInfo

    try:
        clusters[address] = ClusterInfo.decode(body)
    except ValueError as error:
        return f"its list of brokers is malformed: {error}"
    return _registration_problem(clusters[address], clusters)


def _registration_problem(cluster: ClusterInfo, clusters: dict[str, ClusterInfo]) -> str | None:
    """The problem, if any, with a nameserver's brokers, compared with previous nameservers."""
    names = cluster.broker_addr_table.keys()
    if not names:
        return (
            "no broker has registered here; start one with this address in its namesrvAddr, and "
            "check its log"
        )
    for other, other_cluster in clusters.items():
        missing = other_cluster.broker_addr_table.keys() - names
        if missing:
            return (
                f"{', '.join(sorted(missing))} registered at {other} but not here; list all "
                "nameservers in every broker's namesrvAddr"
            )
    return None


def _brokers(
    cluster: ClusterInfo, nameserver: str
) -> Iterator[tuple[BrokerData, int, str, str | None]]:
    for broker in cluster.broker_addr_table.values():
        for broker_id, address in broker.broker_addrs.items():
            yield broker, broker_id, address, _loopback_problem(address, nameserver)


def _loopback_problem(address: str, nameserver: str) -> str | None:
    if _is_loopback(address) and not _is_loopback(nameserver):
        return (
            "it registered a loopback address, which on other machines means those machines; set "
            "its brokerIP1 to an address that clients can reach"
        )
    return None


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
