"""The checker finds each thing that may go wrong, and nothing where all is well."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from headrace_protocol.bodies import MessageQueue
from tests.simulation.history import Ack, Got, History, Life, Place, PromiseBroken, Sent
from tests.simulation.static_promises import Seen, StaticHistory

QUEUE = MessageQueue("Simulated", "broker-0", 0)
GROUP = "ordered"
BODIES = [b"k/0", b"k/1", b"k/2"]


class Received(NamedTuple):
    """A message as a consumer sees it."""

    queue: MessageQueue
    queue_offset: int
    body: bytes
    key: str
    tag: str


def history(stored: list[bytes], got: list[int] | None = None, *, is_sync: bool = True) -> History:
    """All of BODIES were sent and acknowledged; ``got`` are the offsets that a member was given."""
    history = History(is_sync=is_sync, window_s=2.0)
    for number, body in enumerate(BODIES):
        history.sent[body] = Sent("k", number, "", body)
        history.acks.append(Ack(Place(QUEUE, number), body, 0, number, number + 0.5))
    history.final[QUEUE] = list(enumerate(stored))
    for offset in range(len(stored)) if got is None else got:
        history.got.append(Got(GROUP, 0, Place(QUEUE, offset), stored[offset]))
    history.lives.append(Life("broker-0", has_started=True))
    return history


def with_power_cut(history: History, ended_s: float) -> History:
    life = history.lives[0]
    life.end, life.ended_s = "power cut", ended_s
    return history


def test_all_is_well() -> None:
    history(BODIES).check()


def expired(got: list[int], *, is_sync: bool = True) -> History:
    """The first message, sent at 0 s, is gone at 10 s; ``got`` are the offsets that were read."""
    seen = history(BODIES, got, is_sync=is_sync)
    seen.reserved_s, seen.ended_s = 10.0, 10.0
    seen.firsts[QUEUE] = 1
    del seen.final[QUEUE][0]
    return seen


def without_an_offset() -> History:
    seen = history(BODIES)
    del seen.final[QUEUE][1]
    return seen


def acknowledged_in_the_order_stored(*stored: bytes) -> History:
    seen = history([*stored])
    seen.acks = [
        Ack(Place(QUEUE, offset), body, 0, offset, offset + 0.5)
        for offset, body in seen.final[QUEUE]
    ]
    return seen


def read_by(seen: History, group: str, *offsets: int, body: bytes = b"") -> History:
    seen.got += [Got(group, 0, Place(QUEUE, at), body or BODIES[at]) for at in offsets]
    return seen


def lost(*, is_sync: bool = False) -> History:
    return history(BODIES[:2], is_sync=is_sync)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (lost(is_sync=True), r"b'k/2', acknowledged at 2.500 s .* is not there"),
        (history([b"k/0", b"k/2", b"k/1"]), r"b'k/1', acknowledged .* is not there"),
        (without_an_offset(), r"holds the offsets \[0, 2\]"),
        (acknowledged_in_the_order_stored(b"k/1", b"k/0", b"k/2"), "k/0 stands after 1"),
        (read_by(history(BODIES), GROUP, 1, body=b"k/2"), "is not what is there"),
        (history(BODIES, [0, 2, 1]), r"in the order \[0, 2, 1\]"),
        (history(BODIES, [0, 1]), r"ordered never got .*queue_offset=2"),
        # What an asynchronous flush may lose is young, and its broker lost power.
        (with_power_cut(lost(), ended_s=6.0), r"is not there, 3.500 s before a power cut"),
        (lost(), "its broker did not lose power"),
        (with_power_cut(lost(is_sync=True), ended_s=2.6), "is not there"),
        # What expires has been consumed by each group.
        (expired([1, 2]), r"b'k/0', acknowledged .* is not there"),
        (expired([1, 2], is_sync=False), r"b'k/0', acknowledged .* is not there"),
        (read_by(expired([0, 1, 2]), "plain", 1, 2), r"plain never got .*queue_offset=0"),
        (read_by(expired([0, 1, 2]), GROUP, 0, body=b"k/1"), "k/0|k/1"),
    ],
)
def test_a_broken_promise_is_noticed(seen: History, reason: str) -> None:
    with pytest.raises(PromiseBroken, match=reason):
        seen.check()


def test_repeats_are_counted() -> None:
    seen = history([*BODIES, b"k/1"], [0, 1, 0, 1, 2, 3])
    seen.check()
    assert seen.findings["stored twice"] == 1
    assert seen.findings["consumed twice"] == 2


def test_what_was_not_acknowledged_may_come_late() -> None:
    seen = history([b"k/1", b"k/0", b"k/2"])
    seen.acks = [Ack(Place(QUEUE, 0), b"k/1", 0, 0, 1), Ack(Place(QUEUE, 2), b"k/2", 0, 2, 3)]
    seen.check()


def test_asynchronous_flush_may_lose_what_is_young() -> None:
    seen = with_power_cut(history(BODIES[:2], is_sync=False), ended_s=4.0)
    seen.check()
    assert seen.findings["acknowledged, then lost (async)"] == 1
    assert seen.loss_window_s == 1.5


def test_what_is_old_and_consumed_may_expire() -> None:
    seen = expired([0, 1, 2])
    seen.check()
    assert seen.findings["acknowledged, then expired"] == 1


def test_what_is_young_may_not_expire() -> None:
    seen = expired([0, 1, 2])
    seen.ended_s = 9.9
    with pytest.raises(PromiseBroken, match=r"expired 9.900 s after it was sent"):
        seen.check()


def test_who_was_past_what_a_power_cut_took_need_not_have_read_what_expired() -> None:
    with_power_cut(expired([1, 2], is_sync=False), ended_s=20.0).check()


def test_who_does_not_wait_for_the_disk_may_lose() -> None:
    seen = with_power_cut(history(BODIES[:2]), ended_s=4.0)
    seen.sent[b"k/2"] = seen.sent[b"k/2"]._replace(waits=False)
    seen.check()
    assert seen.findings["acknowledged, then lost (WAIT=false)"] == 1
    seen.lives[0].ended_s = 6.0
    with pytest.raises(PromiseBroken, match=r"is not there, 3.500 s before a power cut"):
        seen.check()


def late_group(*answers: Seen) -> StaticHistory:
    """A static topic whose first messages expired before a group read. answers: of brokers."""
    seen = StaticHistory(is_sync=True, window_s=0.0, reserved_s=5)
    seen.sent.update({body: Sent("k", number, "", body) for number, body in enumerate(BODIES)})
    seen.final[QUEUE] = list(enumerate(BODIES))
    seen.firsts[QUEUE] = 2
    seen.got.append(Got(GROUP, 0, Place(QUEUE, 2), BODIES[2]))
    seen.commits[GROUP, QUEUE][1] = 0.0
    seen.answers[GROUP, QUEUE] += answers
    return seen


def test_a_group_of_a_static_topic_need_not_read_what_expired_before_it_began() -> None:
    seen = late_group()
    assert seen.is_consumed({GROUP})
    seen.check_consumed()
    seen.firsts[QUEUE] = 0
    assert not seen.is_consumed({GROUP})


def test_what_expires_after_a_group_of_a_static_topic_began_is_read() -> None:
    seen = late_group(Seen(1, 1.0, 1.1))
    assert not seen.is_consumed({GROUP})
    with pytest.raises(PromiseBroken, match=r"ordered never got .*queue_offset=1"):
        seen.check_consumed()


@pytest.mark.parametrize(("ended_s", "is_kept"), [(0.9, True), (1.0, False), (8.0, True)])
def test_a_broker_may_forget_what_it_has_not_saved(ended_s: float, is_kept: bool) -> None:
    seen = late_group(Seen(1, 1.0, 1.1))
    seen.lives.append(Life("broker-0", has_started=True))
    with_power_cut(seen, ended_s)
    assert seen.is_consumed({GROUP}) is not is_kept


def test_a_group_with_a_filter_gets_what_passes_and_nothing_else() -> None:
    seen = history(BODIES)
    for body, tag in zip(BODIES, ("red", "", "red"), strict=True):
        seen.sent[body] = seen.sent[body]._replace(tag=tag)
    read_by(seen, "filtered", 0)
    assert not seen.is_consumed({"filtered"})
    with pytest.raises(PromiseBroken, match=r"filtered never got .*queue_offset=2"):
        seen.check()
    read_by(seen, "filtered", 2)
    assert seen.is_consumed({"filtered"})
    seen.check()
    message = Received(QUEUE, 1, BODIES[1], "k", "")
    with pytest.raises(PromiseBroken, match=r"filtered got .* which its filter rejects"):
        seen.received("filtered", 0, message)  # type: ignore[arg-type]
    seen.received(GROUP, 0, message)  # type: ignore[arg-type]
