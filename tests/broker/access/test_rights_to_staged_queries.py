"""A staged query belongs to the user of its first block, also after a restart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.store.files.filesystem import Files
from headrace_broker.store_tools.staged_check import staged_findings
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.headers import (
    StageAbortHeader,
    StageCommitHeader,
    StageDecideHeader,
    StageQueryHeader,
    StageSealHeader,
    StageSealResponseHeader,
    StageSendHeader,
)
from headrace_protocol.staging import Decision, StagedAttempt, encode_names
from tests.support.batches import block
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.rights import client_of, rights_of, users_of

OK, REFUSED = ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION
RULES = ["Topic:T Pub"]


def start(folder: Path) -> BrokerUnderTest:
    rights = rights_of(users_of(alice=RULES, bob=RULES))
    broker = BrokerUnderTest(folder, rights=rights)
    broker.create_topic("T", 1)
    return broker


def asked(
    broker: BrokerUnderTest, user: str, code: int, header: msgspec.Struct, body: bytes = b""
) -> Answer:
    return broker.ask(code, header, body, client_of(user))


def send(broker: BrokerUnderTest, user: str, attempt: str) -> Answer:
    header = StageSendHeader(
        producer_group="p",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=1,
        queue_id=0,
        count=1,
        query_id="q",
        batch_id=0,
        attempt=attempt,
        block_number=0,
    )
    return asked(broker, user, RequestCode.STAGE_SEND, header, bytes(block(b"body").body))


def seal(broker: BrokerUnderTest, user: str) -> Answer:
    header = StageSealHeader(query_id="q", batch_id=0, attempt="a", block_count=1)
    return asked(broker, user, RequestCode.STAGE_SEAL, header)


def decide(broker: BrokerUnderTest, user: str, sealed: Answer) -> Answer:
    found = sealed.command.header(StageSealResponseHeader)
    staged = StagedAttempt("a", found.file_bytes, found.record_count)
    decision = Decision("d", 0, {"broker-a": (staged,)})
    return asked(
        broker, user, RequestCode.STAGE_DECIDE, StageDecideHeader(query_id="q"), decision.encode()
    )


OTHERS: dict[int, tuple[msgspec.Struct, bytes]] = {
    RequestCode.STAGE_SEAL: (
        StageSealHeader(query_id="q", batch_id=0, attempt="a", block_count=1),
        b"",
    ),
    RequestCode.STAGE_STATE: (StageQueryHeader(query_id="q"), b""),
    RequestCode.STAGE_DECIDE: (StageDecideHeader(query_id="q"), Decision("x", 0, {}).encode()),
    RequestCode.STAGE_COMMIT: (
        StageCommitHeader(query_id="q", batch_id=0, decision_id="d"),
        b"",
    ),
    RequestCode.STAGE_ABORT: (StageAbortHeader(query_id="q", batch_id=0), encode_names(["a"])),
    RequestCode.STAGE_FORGET: (StageQueryHeader(query_id="q"), b""),
}


def check_closed(broker: BrokerUnderTest, user: str) -> None:
    """No request of ``user`` about the query is served."""
    answers: list[Any] = [send(broker, user, "b")]
    answers += [asked(broker, user, code, *OTHERS[code]) for code in OTHERS]
    for answer in answers:
        assert answer.code == REFUSED
        assert answer.remark == (
            f"User:{user} has no permission to access the staged query q from 127.0.0.1: it "
            "belongs to the user of its first block"
        )


def test_others_can_not_touch_a_query(tmp_path: Path) -> None:
    broker = start(tmp_path)
    assert send(broker, "alice", "a").code == OK
    check_closed(broker, "bob")
    sealed = seal(broker, "alice")
    assert sealed.code == OK
    check_closed(broker, "bob")
    assert decide(broker, "alice", sealed).code == OK
    check_closed(broker, "bob")


def test_a_super_user_may(tmp_path: Path) -> None:
    broker = start(tmp_path)
    assert send(broker, "alice", "a").code == OK
    assert decide(broker, "root", seal(broker, "root")).code == OK
    check_closed(broker, "bob")
    assert (
        asked(broker, "alice", RequestCode.STAGE_STATE, StageQueryHeader(query_id="q")).code == OK
    )


def test_a_decided_query_has_its_owner_after_a_restart(tmp_path: Path) -> None:
    broker = start(tmp_path)
    send(broker, "alice", "a")
    assert decide(broker, "alice", seal(broker, "alice")).code == OK
    broker.close()
    again = start(tmp_path)
    check_closed(again, "bob")
    state = asked(again, "alice", RequestCode.STAGE_STATE, StageQueryHeader(query_id="q"))
    assert (state.code, Decision.decode(state.body).decision_id) == (OK, "d")


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_undecided_query_has_its_owner_after_a_restart(
    tmp_path: Path, is_sealed: bool, is_killed: bool
) -> None:
    broker = start(tmp_path / "first")
    assert send(broker, "alice", "a").code == OK
    if is_sealed:
        assert seal(broker, "alice").code == OK
    if is_killed:
        shutil.copytree(tmp_path / "first", tmp_path / "second")
    broker.close()
    again = start(tmp_path / ("second" if is_killed else "first"))
    await again.staging.expire()
    check_closed(again, "bob")
    sealed = seal(again, "alice")
    assert sealed.code == OK
    assert decide(again, "alice", sealed).code == OK
    check_closed(again, "bob")


def test_the_owner_goes_with_the_last_attempt(tmp_path: Path) -> None:
    broker = start(tmp_path)
    send(broker, "alice", "a")
    owner = next(tmp_path.glob("**/owner.json"))
    header, body = OTHERS[RequestCode.STAGE_ABORT]
    assert asked(broker, "alice", RequestCode.STAGE_ABORT, header, body).code == OK
    assert not owner.parent.exists()
    assert send(broker, "bob", "a").code == OK
    check_closed(broker, "alice")
    broker.close()
    for path in owner.parent.glob("*.blocks"):
        path.unlink()
    again = start(tmp_path)
    assert not owner.exists()
    assert send(again, "alice", "a").code == OK


def test_an_owner_that_can_not_be_removed(tmp_path: Path) -> None:
    broker = start(tmp_path)
    send(broker, "alice", "a")
    owner = next(tmp_path.glob("**/owner.json"))
    owner.unlink()
    owner.mkdir()
    header, body = OTHERS[RequestCode.STAGE_ABORT]
    answer = asked(broker, "alice", RequestCode.STAGE_ABORT, header, body)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert str(owner) in answer.remark


def test_a_damaged_owner_opens_the_query_to_nobody(tmp_path: Path) -> None:
    broker = start(tmp_path)
    send(broker, "alice", "a")
    broker.close()
    owner = next(tmp_path.glob("**/owner.json"))
    for data, problem in ((b"{", ["unknown whose query it is"]), (b"", [])):
        owner.write_bytes(data)
        findings = [str(found) for found in staged_findings(owner.parent.parent.parent, Files())]
        again = start(tmp_path)
        answer = send(again, "bob", "b")
        again.close()
        assert len(findings) == len(problem)
        assert all(part in found for part, found in zip(problem, findings, strict=True))
        assert answer.code == (ResponseCode.SYSTEM_ERROR if problem else OK)


@pytest.mark.parametrize("first", ["alice", "bob"])
def test_a_name_is_free_again_once_it_is_forgotten(tmp_path: Path, first: str) -> None:
    broker = start(tmp_path)
    send(broker, "alice", "a")
    header, body = OTHERS[RequestCode.STAGE_ABORT]
    assert asked(broker, "alice", RequestCode.STAGE_ABORT, header, body).code == OK
    assert (
        asked(broker, "alice", RequestCode.STAGE_FORGET, StageQueryHeader(query_id="q")).code == OK
    )
    assert send(broker, first, "a").code == OK
    check_closed(broker, {"alice": "bob", "bob": "alice"}[first])
