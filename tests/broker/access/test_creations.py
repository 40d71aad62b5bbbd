"""Topics and groups that come into being by their first use: each place asks for Create."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace_broker
from headrace_protocol.admin_headers import CloneGroupOffsetHeader
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import StageSendHeader
from headrace_protocol.rights.users import Users
from tests.broker.access.test_rights_of_consumers import beat
from tests.support.batches import block
from tests.support.broker import BrokerUnderTest
from tests.support.memory import HOST
from tests.support.rights import client_of, rights_of, rules_of, users_of
from tests.support.wire import bulk_pull_header, bulk_send_header, pull_header, send_header

ROOT = Path(headrace_broker.__file__).parent
# What creates, and the number of its arguments with a check in front of it.
CREATORS = {"get_or_create": 3, "check_consumable": 3, "create_on_send": 5}
BLOCK = bytes(block(b"body", topic="new").body)
STAGED = StageSendHeader(
    producer_group="p",
    topic="new",
    default_topic="TBW102",
    default_topic_queue_nums=1,
    queue_id=0,
    count=1,
    query_id="q",
    batch_id=0,
    attempt="a",
    block_number=0,
)
C = RequestCode
TOPICS: dict[int, tuple[Any, bytes]] = {
    C.SEND_MESSAGE_V2: (send_header(topic="new"), b"x"),
    C.BULK_SEND: (bulk_send_header(topic="new", count=1), BLOCK),
    C.STAGE_SEND: (STAGED, BLOCK),
}
GROUPS: dict[int, tuple[Any, bytes]] = {
    C.HEART_BEAT: (None, beat({"new": ["T"]})),
    C.PULL_MESSAGE: (pull_header(consumer_group="new"), b""),
    C.LITE_PULL_MESSAGE: (pull_header(consumer_group="new"), b""),
    C.BULK_PULL: (bulk_pull_header(consumer_group="new"), b""),
    C.CLONE_GROUP_OFFSET: (
        CloneGroupOffsetHeader(src_group="g", dest_group="new", topic="T"),
        b"",
    ),
}


@pytest.fixture
def users() -> Users:
    return users_of(alice=[])


@pytest.fixture
def broker(tmp_path: Path, users: Users) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path, rights=rights_of(users), commit_log_file_bytes=1 << 20)
    broker.create_topic("T", 1)
    broker.groups.get_or_create("g", HOST)
    return broker


@pytest.mark.parametrize("code", TOPICS, ids=lambda code: C(code).name)
def test_a_new_topic_needs_create(broker: BrokerUnderTest, users: Users, code: int) -> None:
    header, body = TOPICS[code]
    users.put_rules("alice", rules_of("Topic:new Pub"))
    answer = broker.ask(code, header, body, client_of("alice"))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "Topic:new: it does not exist, creating it needs Create" in answer.remark
    assert broker.topics.get("new") is None
    users.put_rules("alice", rules_of("Topic:new Pub,Create"))
    assert broker.ask(code, header, body, client_of("alice")).code == ResponseCode.SUCCESS
    assert broker.topics.get("new") is not None


@pytest.mark.parametrize("code", GROUPS, ids=lambda code: C(code).name)
def test_a_new_group_needs_create(broker: BrokerUnderTest, users: Users, code: int) -> None:
    header, body = GROUPS[code]
    rules = ["Topic:T Sub,Update", "Group:g Sub,Update"]
    users.put_rules("alice", rules_of(*rules, "Group:new Sub,Update"))
    answer = broker.ask(code, header, body, client_of("alice"))
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "Group:new: it does not exist, creating it needs Create" in answer.remark
    assert broker.groups.get("new") is None
    users.put_rules("alice", rules_of(*rules, "Group:new Sub,Update,Create"))
    assert broker.ask(code, header, body, client_of("alice")).code != ResponseCode.NO_PERMISSION
    assert broker.groups.get("new") is not None


def creations() -> Iterator[tuple[str, bool]]:
    """Each call of the broker that may create, and whether it has a check."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                wanted = CREATORS.get(node.func.attr)
                if wanted is not None:
                    count = len(node.args) + len(node.keywords)
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", count >= wanted


def test_each_place_that_creates_checks() -> None:
    found = list(creations())
    assert len(found) >= 6
    assert not [place for place, is_checked in found if not is_checked]
