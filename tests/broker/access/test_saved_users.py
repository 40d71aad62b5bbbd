"""The users of a broker are saved by the files of its store, which keep room for that."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.rights.auth_requests import UserHeader, UserInfo
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.rights import client_of
from tests.support.stores import FaultyFiles


def test_users_are_saved_by_the_files_of_the_store(tmp_path: Path) -> None:
    config = broker_config(
        tmp_path,
        authentication_enabled=True,
        init_authentication_user=SecretStr('{"username":"root","password":"secret"}'),
    )
    files = FaultyFiles()
    broker = BrokerUnderTest(tmp_path, config, files=files)
    header = UserHeader(username="alice")
    body = UserInfo(username="alice", password="hidden").encode()
    codes = []
    for files.is_unwritable in (True, False):
        answer = broker.ask(RequestCode.AUTH_CREATE_USER, header, body, client_of("root"))
        codes.append(answer.code)
    assert codes == [ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SUCCESS]
    assert sorted(broker.core.rights.users.users) == ["alice", "root"]
