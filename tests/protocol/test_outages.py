"""Log lines about things that are away."""

from headrace_protocol.outages import REPEAT_S, Outages


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_outage_is_a_line_each_half_minute_and_one_at_its_end() -> None:
    lines: list[str] = []
    clock = Clock()
    outages = Outages(lines.append, clock)
    for _ in range(122):
        outages.failed("broker a", "connection refused")
        clock.now += 0.5
    assert lines == [
        "broker a is unavailable, retrying: connection refused",
        "broker a has been unavailable for 30 s (61 attempts): connection refused",
        "broker a has been unavailable for 60 s (121 attempts): connection refused",
    ]
    outages.worked("broker a")
    outages.worked("broker a")
    assert lines[3:] == ["broker a is available again after 61 s"]


def test_an_end_may_be_logged_at_another_level() -> None:
    begun: list[str] = []
    ended: list[str] = []
    outages = Outages(begun.append, Clock(), ended.append)
    outages.failed("broker a", "reset")
    outages.worked("broker a")
    assert begun == ["broker a is unavailable, retrying: reset"]
    assert ended == ["broker a is available again after 0 s"]


def test_outages_of_different_things_are_told_apart() -> None:
    lines: list[str] = []
    clock = Clock()
    outages = Outages(lines.append, clock)
    outages.failed("broker a", "reset")
    clock.now += REPEAT_S / 2
    outages.failed("nameserver", "timeout")
    assert outages.names == {"broker a", "nameserver"}
    assert (outages.seconds("broker a"), outages.seconds("broker b")) == (REPEAT_S / 2, 0.0)
    outages.forget("broker a")
    outages.worked("broker a")
    outages.failed("broker a", "reset")
    assert lines == [
        "broker a is unavailable, retrying: reset",
        "nameserver is unavailable, retrying: timeout",
        "broker a is unavailable, retrying: reset",
    ]


def test_a_thing_that_comes_and_goes_is_a_line_each_half_minute() -> None:
    lines: list[str] = []
    clock = Clock()
    outages = Outages(lines.append, clock)
    for _ in range(70):
        outages.failed("broker a", "busy")
        outages.worked("broker a")
        clock.now += 0.5
    assert (
        lines
        == [
            "broker a is unavailable, retrying: busy",
            "broker a is available again after 0 s",
        ]
        * 2
    )


def test_an_outage_that_follows_another_is_logged_if_it_lasts() -> None:
    lines: list[str] = []
    clock = Clock()
    outages = Outages(lines.append, clock)
    outages.failed("broker a", "reset")
    outages.worked("broker a")
    for _ in range(40):
        clock.now += 1
        outages.failed("broker a", "refused")
    outages.worked("broker a")
    assert lines[2:] == [
        "broker a has been unavailable for 29 s (30 attempts): refused",
        "broker a is available again after 39 s",
    ]


def test_an_outage_of_several_parts_ends_with_the_last() -> None:
    lines: list[str] = []
    outages = Outages(lines.append, Clock())
    for queue in (0, 1, 2):
        outages.failed("topic t", "damaged", queue)
    outages.worked("topic t", 0)
    outages.forget("topic t", 1)
    outages.worked("topic t", 3)
    assert outages
    assert lines == ["topic t is unavailable, retrying: damaged"]
    outages.worked("topic t", 2)
    assert not outages
    assert lines[1:] == ["topic t is available again after 0 s"]
