"""A search that expects its target near the beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.store.files.gallop import gallop


@given(st.integers(0, 50), st.integers(0, 200), st.integers(-5, 300))
def test_the_first_number_that_is_not_before(low: int, count: int, target: int) -> None:
    high = low + count
    looked: list[int] = []

    def is_before(number: int) -> bool:
        looked.append(number)
        return number < target

    found = gallop(low, high, is_before)
    assert found == min(max(target, low), high)
    assert all(low <= number < high for number in looked)
    assert len(looked) <= 2 * (found - low + 2).bit_length() + 1
