"""Numbers and names of requests are the peer's."""

from __future__ import annotations

from headrace_protocol.codes import code_name
from tests.support.golden_frames import golden_frames


def test_requests_have_the_names_that_were_recorded() -> None:
    requests = {(frame.code, frame.name) for frame in golden_frames() if not frame.response}
    assert len(requests) > 40
    assert {(code, code_name(code)) for code, _ in requests} == requests


def test_unknown_codes_have_a_name_too() -> None:
    assert code_name(9999) == "CODE_9999"
