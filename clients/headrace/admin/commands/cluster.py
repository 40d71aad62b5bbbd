"""``headrace cluster``: lists the brokers that the nameserver knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.admin import options
from headrace.admin.output import print_rows
from headrace.admin.running import run_admin
from headrace.missing import departed_part

if TYPE_CHECKING:
    from headrace.admin.client import Admin
    from headrace.admin.requests import BrokerNode
    from headrace.errors import HeadraceError
    from headrace_protocol.departed import DepartedBroker


@options.command("cluster", "headrace cluster", "headrace cluster --json")
@options.answer
def command(*, as_json: bool, nameserver: str | None) -> None:
    """List the brokers with their rates, and those that left."""
    from headrace.tasks import gather

    async def run(admin: Admin) -> list[dict[str, Any]]:
        nodes = await admin.cluster()
        infos = await gather(lambda node: admin.runtime_info(node.address), nodes)
        departed = await admin.departed_brokers()
        rows = [_row(node, info) for node, info in zip(nodes, infos, strict=True)]
        return [*rows, *map(_row_of_departed, departed)]

    empty = "no broker has registered; start one with `headrace broker` or `headrace dev`"
    print_rows(run_admin(run, nameserver), as_json=as_json, empty=empty)


def _row(node: BrokerNode, info: dict[str, str] | HeadraceError) -> dict[str, Any]:
    figures, problem = _figures({}), None if isinstance(info, dict) else str(info)
    if isinstance(info, dict):
        try:
            figures, problem = _figures(info), _refusal(info)
        except ValueError as error:
            problem = f"{node.address} sent a malformed number: {error}"
    return {
        "cluster": node.cluster,
        "broker": node.broker_name,
        "id": node.broker_id,
        "address": node.address,
        "version": info.get("brokerVersionDesc") if isinstance(info, dict) else None,
        **figures,
        "problem": problem,
    }


def _row_of_departed(broker: DepartedBroker) -> dict[str, Any]:
    return {
        "cluster": broker.cluster,
        "broker": broker.broker_name,
        "id": None,
        "address": broker.broker_addr,
        "version": None,
        **_figures({}),
        "problem": departed_part(broker).why,
    }


def _figures(info: dict[str, str]) -> dict[str, float | None]:
    """Numeric columns of a broker. Raises ValueError."""
    return {
        "in_per_second": _rate(info.get("putTps")),
        "out_per_second": _rate(info.get("getTransferredTps")),
        "disk_used_percent": _percent(info.get("commitLogDiskRatio")),
        "disk_full_in_hours": _number(info.get("diskFullInHours")),
    }


def _refusal(info: dict[str, str]) -> str | None:
    """The reason why a headrace broker refuses writes; None if it accepts them."""
    refusal = info.get("refusesWrites", "no")
    return None if refusal == "no" else refusal


def _percent(ratio: str | None) -> float | None:
    number = _number(ratio)
    return None if number is None else round(100 * number, 1)


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _rate(rates: str | None) -> float | None:
    """The first of several rates: that of the last ten seconds."""
    first, *_ = (rates or "").split() or [""]
    return _number(first)
