"""A full table of hosts gives a newcomer room after a look at two of them, however busy all are."""

from __future__ import annotations

from headrace_daemon.buckets import Buckets, Recent

MOST = 100


class Counted:
    """A value that counts how often it is asked whether it is in use."""

    looks = 0

    def __init__(self, is_in_use: bool) -> None:
        self.is_in_use = is_in_use

    def looked(self) -> bool:
        Counted.looks += 1
        return self.is_in_use


def full(is_in_use: bool) -> Recent[int, Counted]:
    recent: Recent[int, Counted] = Recent(MOST, Counted.looked)
    for key in range(MOST):
        recent.use(key, lambda: Counted(is_in_use))
    Counted.looks = 0
    return recent


def test_a_newcomer_takes_the_place_of_the_one_used_longest_ago() -> None:
    recent = full(is_in_use=False)
    recent.use(0, lambda: Counted(is_in_use=False))
    recent.use(MOST, lambda: Counted(is_in_use=False))
    assert list(recent) == [*range(2, MOST), 0, MOST]
    assert Counted.looks == 1


def test_each_newcomer_looks_at_two() -> None:
    for is_in_use in (False, True):
        recent = full(is_in_use)
        for key in range(MOST, 3 * MOST):
            recent.use(key, lambda: Counted(is_in_use=False))
        assert Counted.looks <= 2 * 2 * MOST
        assert len(recent) <= 2 * MOST
        # Those in use have stayed.
        assert (len(recent.keys() & set(range(MOST))) == MOST) == is_in_use


def test_what_is_no_longer_in_use_makes_room() -> None:
    recent = full(is_in_use=True)
    for key in range(MOST, 2 * MOST):
        recent.use(key, lambda: Counted(is_in_use=True))
    assert len(recent) == 2 * MOST
    for value in recent.values():
        value.is_in_use = False
    for key in range(2 * MOST, 4 * MOST):
        recent.use(key, lambda: Counted(is_in_use=False))
    assert len(recent) == MOST


def test_hosts_without_number_take_a_bounded_table() -> None:
    buckets = Buckets(rate=1.0, wait_s_max=0.0)
    for number in range(10_050):
        assert buckets.take(f"host{number}", 5.0) == 0
    assert len(buckets) == 10_000
    assert buckets.take("host10049", 5.0) is None
    assert buckets.wait_s("host10049", 5.5) == 0.5
    assert buckets.wait_s("host0", 5.0) == 0  # forgotten
