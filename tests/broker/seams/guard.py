"""A guard that refuses the clients of some hosts."""

from __future__ import annotations

from headrace_protocol.codes import ResponseCode
from headrace_protocol.serving import Registry, Reply, Request

REMARK = "this host is banned"


class Ban:
    """hosts: those that are refused from now on."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()

    def add_to(self, registry: Registry) -> None:
        registry.guard(self.refuse)

    def refuse(self, request: Request) -> Reply | None:
        host, _, _ = request.channel.address.rpartition(":")
        if host in self.hosts:
            return Reply(code=ResponseCode.NO_PERMISSION, remark=REMARK)
        return None
