"""The settings of a nameserver, as mqadmin asks for them."""

from __future__ import annotations

import pytest

from headrace_daemon.access.settings import Secret
from headrace_nameserver.config import NameServerConfig
from headrace_nameserver.settings_requests import SettingsRequests
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.errors import RequestError
from headrace_protocol.serving import Registry, Reply
from tests.support.rights import request_of


def answer(code: RequestCode) -> Reply:
    config = NameServerConfig(
        listen_port=9999,
        order_message_enable=True,
        init_authentication_user=Secret('{"username":"root","password":"hush"}'),
    )
    registry = Registry(lambda *_: None)
    SettingsRequests(config).register(registry)
    reply = registry.functions[code](request_of(code, {}))
    assert isinstance(reply, Reply)
    return reply


def test_all_settings_are_shown_but_secrets() -> None:
    text = bytes(answer(RequestCode.GET_NAMESRV_CONFIG).body[0]).decode()
    settings = dict(line.split("=", 1) for line in text.splitlines())
    assert settings["listenPort"] == "9999"
    assert settings["orderMessageEnable"] == "true"
    assert settings["initAuthenticationUser"] == "***"
    assert "hush" not in text


def test_no_setting_changes_while_it_runs() -> None:
    with pytest.raises(RequestError, match="restart it") as raised:
        answer(RequestCode.UPDATE_NAMESRV_CONFIG)
    assert raised.value.code == ResponseCode.NO_PERMISSION
