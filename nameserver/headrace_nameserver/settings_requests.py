"""GET_NAMESRV_CONFIG (319) and UPDATE_NAMESRV_CONFIG (318), which is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Reply

if TYPE_CHECKING:
    from headrace_nameserver.config import NameServerConfig
    from headrace_protocol.serving import Registry, Request


class SettingsRequests:
    """Shows the settings of a nameserver, without its secrets."""

    def __init__(self, config: NameServerConfig) -> None:
        self._config = config

    def register(self, registry: Registry) -> None:
        """Route both requests."""
        registry.route(RequestCode.GET_NAMESRV_CONFIG, self.settings)
        registry.route(RequestCode.UPDATE_NAMESRV_CONFIG, self.update)

    def settings(self, _request: Request) -> Reply:
        """GET_NAMESRV_CONFIG: all settings, in the format of the nameserver's file."""
        config = self._config
        lines = [
            f"{field.encode_name}={_text(getattr(config, field.name))}\n"
            for field in msgspec.structs.fields(config)
        ]
        return Reply(body=("".join(sorted(lines)).encode(),))

    def update(self, _request: Request) -> Reply:
        """UPDATE_NAMESRV_CONFIG: no setting changes while a nameserver runs."""
        raise RequestError(
            ResponseCode.NO_PERMISSION,
            "a nameserver's settings change with its file: edit nameserver.conf and restart it",
        )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ",".join(map(_text, value))
    return "" if value is None else str(value)
