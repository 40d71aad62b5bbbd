"""``headrace cluster``: the brokers that the nameserver knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.admin.options import Json, Nameserver
from headrace.admin.output import print_rows

if TYPE_CHECKING:
    from headrace.admin.client import Admin, BrokerNode


def cluster(as_json: Json = False, nameserver: Nameserver = None) -> None:
    """List the brokers with their rates."""
    import trio

    from headrace.admin.client import Admin

    async def run() -> list[dict[str, Any]]:
        async with Admin(nameserver=nameserver) as admin:
            return [await _row(admin, node) for node in await admin.cluster()]

    empty = "no broker has registered: start one with `headrace broker` or `headrace dev`"
    print_rows(trio.run(run), as_json=as_json, empty=empty)


async def _row(admin: Admin, node: BrokerNode) -> dict[str, Any]:
    from headrace.errors import HeadraceError

    try:
        info = await admin.runtime_info(node.address)
        problem = _refusal(info)
    except HeadraceError as error:
        info, problem = {}, str(error)
    return {
        "cluster": node.cluster,
        "broker": node.broker_name,
        "id": node.broker_id,
        "address": node.address,
        "version": info.get("brokerVersionDesc"),
        "in_per_second": _rate(info.get("putTps")),
        "out_per_second": _rate(info.get("getTransferredTps")),
        "disk_used_percent": _percent(info.get("commitLogDiskRatio")),
        "disk_full_in_hours": _number(info.get("diskFullInHours")),
        "problem": problem,
    }


def _refusal(info: dict[str, str]) -> str | None:
    """Why a broker of ours takes no messages."""
    refusal = info.get("refusesWrites", "no")
    return None if refusal == "no" else refusal


def _percent(ratio: str | None) -> float | None:
    number = _number(ratio)
    return None if number is None else round(100 * number, 1)


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def _rate(rates: str | None) -> float | None:
    """The first of several rates, which is that of the last ten seconds."""
    return float(rates.split()[0]) if rates else None
