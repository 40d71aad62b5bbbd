"""A slice of ``make fuzz``, the same every time, and proof that it finds what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace_protocol import bodies
from headrace_protocol.frame import FrameReader
from tests.fuzz.corpus import Seed, corpus
from tests.fuzz.promise import PromiseBroken, Reader
from tests.fuzz.run import Chunk, Failure, report, run_chunk

FRAMES = 2000


@pytest.fixture(scope="module")
def seeds() -> list[Seed]:
    return corpus()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_spoiled_frames_are_read_as_promised(seeds: list[Seed], chunk: int) -> None:
    result = run_chunk(Reader(), seeds, seed=0, chunk=chunk, frames=FRAMES)
    assert isinstance(result, Chunk), result
    # Nearly all stay whole frames, so that what is in them is reached.
    assert FRAMES * 0.8 < result.read_frames < FRAMES


def test_a_chunk_is_the_same_every_time(seeds: list[Seed]) -> None:
    first, again = (run_chunk(Reader(), seeds, seed=7, chunk=3, frames=80) for _ in range(2))
    assert first == again


def test_unspoiled_frames_are_read(seeds: list[Seed]) -> None:
    reader = Reader()
    for seed in seeds:
        prefix = (4 + len(seed.header) + len(seed.body)).to_bytes(4, "big")
        mark = (seed.serialize_type << 24 | len(seed.header)).to_bytes(4, "big")
        stream = prefix + mark + seed.header + seed.body
        assert reader.check(stream, list(range(1, len(stream), 7)), [seed]) == 1


# -- what would break the promise is found ---------------------------------------------------------


def test_an_exception_of_another_kind_is_found(
    seeds: list[Seed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(data: memoryview) -> None:
        raise KeyError(bytes(data[:1]))

    monkeypatch.setattr(bodies.HeartbeatData, "decode", decode)
    result = run_chunk(Reader(), seeds, seed=0, chunk=0, frames=FRAMES)
    assert isinstance(result, Failure)
    assert "KeyError" in result.reason
    assert result.data


def test_frames_that_depend_on_the_cut_are_found(
    seeds: list[Seed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrameReader, "_begin_partial", lambda *_: None)
    with pytest.raises(PromiseBroken, match="reads otherwise than whole"):
        Reader().check(b"\0\0\0\x06\0\0\0\x02{}", [5], seeds[:1])


def test_a_failure_says_how_to_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    report(Failure(chunk=3, reason="KeyError: 1", data=b"\x00"), seed=5)
    said = capsys.readouterr().out
    assert "KeyError: 1\nbytes: b'\\x00'" in said
    assert "again: make fuzz SEED=5 START=30000 FRAMES=10000" in said


@pytest.mark.slow
def test_a_run_says_its_seed() -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", "--seed=5", "--start=40000", "--frames=1"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "seed 5: 10000 frames from 40000" in ended.stdout
