from __future__ import annotations

import re
from pathlib import Path

from headrace_broker.processors import send
from headrace_protocol import frame
from tests.bench.profiles import STAGES, fold, summary

SEND, FRAME = send.__file__, frame.__file__
LINE_OF_APPEND = 1 + next(
    number
    for number, line in enumerate(Path(SEND).read_text().splitlines())
    if "_stored_properties(" in line
)


def stack(*frames: str) -> str:
    return ";".join(("main (/usr/bin/headrace:1)", *frames))


RAW = "\n".join(
    (
        f"{stack(f'FrameReader.feed ({FRAME}:80)')} 60",
        f"{stack(f'SendProcessor.send_ready ({SEND}:{LINE_OF_APPEND})')} 30",
        f"{stack(f'SendProcessor.send_ready ({SEND}:1)', 'sum (/lib/python3/sums.py:3)')} 9",
        "start (/lib/python3/threading.py:5) 1",
        "process 7",
    )
)


def test_a_sample_belongs_to_the_stage_nearest_to_where_it_was_taken() -> None:
    profile = fold(RAW)
    assert profile.total == 100
    assert profile.stages == {"frame": 60, "properties": 30, "checks": 9, "other": 1}


def alternatives(pattern: str) -> set[str]:
    """The patterns without a choice that a pattern stands for."""
    group = re.search(r"\(([^()]*)\)", pattern)
    if group is None:
        return set(pattern.split("|"))
    parts = [
        pattern[: group.start()] + each + pattern[group.end() :] for each in group[1].split("|")
    ]
    return set().union(*map(alternatives, parts))


def test_a_stage_names_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    folders = ("protocol", "daemon", "broker")
    files = [str(path) for folder in folders for path in root.glob(f"{folder}/**/*.py")]
    named = set().union(*(alternatives(stage.path) for stage in STAGES))
    lost = {path for path in named if not any(re.search(path, file) for file in files)}
    assert lost == {"/asyncio/", "/selectors\\.py", "/trio/"}


def test_answers_to_sends_are_replies() -> None:
    profile = fold(f"{stack(f'SendProcessor.send_ready ({SEND}:1)', f'_replies ({SEND}:1)')} 5")
    assert profile.stages == {"reply": 5}


def test_a_function_has_its_own_time_and_that_of_what_it_calls() -> None:
    profile = fold(RAW)
    name = "SendProcessor.send_ready (headrace_broker/processors/send.py)"
    assert (profile.own[name], profile.inside[name]) == (30, 39)


def test_shares_become_microseconds_per_message() -> None:
    text = summary("sync-32", {"rate": 30_000.0, "broker_cpu_us": 20.0}, fold(RAW))
    assert "frame             12.000    60.0%" in text
    assert "12.000  12.000  FrameReader.feed (headrace_protocol/frame.py)" in text
