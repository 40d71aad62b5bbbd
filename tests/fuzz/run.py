"""``make fuzz``: ten million spoiled frames through everything that reads bytes.

The frames come in chunks, each with a seed of its own made of the run's seed and the chunk's
number; a failure names both, and the same command with ``START`` repeats it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from random import Random
from types import FrameType
from typing import NamedTuple

from tests.fuzz.corpus import Seed, corpus
from tests.fuzz.mutations import below, spoiled_inside, spoiled_outside
from tests.fuzz.promise import Reader

FRAMES = 10_000_000
CHUNK_FRAMES = 10_000
STREAM_FRAMES = 8
# A chunk takes half a second; what takes this long hangs.
CHUNK_SECONDS_MAX = 60
# Over what a process holds after its first chunk.
GROWTH_BYTES_MAX = 256 * 1024 * 1024
REPORT_S = 10.0
DATA_BYTES_SHOWN = 1000


class Failure(NamedTuple):
    """A chunk that broke the promise, and how."""

    chunk: int
    reason: str
    data: bytes


class Chunk(NamedTuple):
    """A chunk that kept it, and how many whole frames its streams held."""

    chunk: int
    read_frames: int


def run_chunk(
    reader: Reader, seeds: list[Seed], seed: int, chunk: int, frames: int = CHUNK_FRAMES
) -> Chunk | Failure:
    """Read one chunk of frames; the same for the same numbers, on every machine."""
    rng = random.Random(f"{seed}/{chunk}")
    read_frames = 0
    try:
        for _ in range(0, frames, STREAM_FRAMES):
            frames_inside, last, stream_seeds = make_stream(rng, seeds)
            stream = frames_inside + last
            cuts = sorted([*make_cuts(rng, len(stream)), len(frames_inside)])
            read_frames += reader.check(stream, cuts, stream_seeds)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return Failure(chunk, _describe(error), getattr(error, "data", b""))
    return Chunk(chunk, read_frames)


def make_stream(rng: Random, seeds: list[Seed]) -> tuple[bytes, bytes, list[Seed]]:
    """Frames spoiled inside, so that all are reached, and one spoiled from outside after them."""
    chosen = [seeds[below(rng, len(seeds))] for _ in range(STREAM_FRAMES)]
    parts = [
        spoiled_inside(rng, seed, seeds[below(rng, len(seeds))])
        for seed in chosen[: STREAM_FRAMES - 1]
    ]
    return b"".join(parts), spoiled_outside(rng, chosen[-1], chosen[0]), chosen


def make_cuts(rng: Random, stream_bytes: int) -> list[int]:
    """The cuts of the stream: nearly always a few, now and then one at every byte."""
    if below(rng, 256) == 0:
        return list(range(1, stream_bytes))
    return [below(rng, stream_bytes + 1) for _ in range(below(rng, 6))]


# -- processes -------------------------------------------------------------------------------------


class Hang(Exception):
    """A chunk did not end."""


_worker: tuple[Reader, list[Seed], int] | None = None
_first_peak_bytes = 0


def _start_worker(seed: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _hang)
    _worker = (Reader(), corpus(), seed)


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise Hang(f"no end after {CHUNK_SECONDS_MAX} s")


def _work(chunk: int) -> Chunk | Failure:
    assert _worker is not None
    reader, seeds, seed = _worker
    signal.alarm(CHUNK_SECONDS_MAX)
    result = run_chunk(reader, seeds, seed, chunk)
    signal.alarm(0)
    return _growth(chunk) or result


def _growth(chunk: int) -> Failure | None:
    """Memory that is held, or was held for one frame."""
    global _first_peak_bytes
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _first_peak_bytes = _first_peak_bytes or peak_bytes
    growth = peak_bytes - _first_peak_bytes
    if growth < GROWTH_BYTES_MAX:
        return None
    return Failure(chunk, f"the process grew by {growth} bytes", b"")


def run(seed: int, start: int, frames: int, processes: int) -> bool:
    """Read all frames; returns whether every chunk kept the promise."""
    chunks = range(start // CHUNK_FRAMES, -(-(start + frames) // CHUNK_FRAMES))
    _say(f"seed {seed}: {len(chunks) * CHUNK_FRAMES} frames from {start} in {processes} processes")
    with multiprocessing.get_context("fork").Pool(processes, _start_worker, (seed,)) as pool:
        failed = False
        for failure in _failures(pool.imap_unordered(_work, chunks), len(chunks)):
            failed = True
            report(failure, seed)
    return not failed


def _failures(results: Iterable[Chunk | Failure], chunk_count: int) -> Iterator[Failure]:
    """The failures, at most a few; says now and then how far it is."""
    begun = said = time.monotonic()
    read_frames = failed = 0
    for done, result in enumerate(results, start=1):
        if isinstance(result, Failure):
            failed += 1
            yield result
        else:
            read_frames += result.read_frames
        now = time.monotonic()
        if now - said > REPORT_S or done == chunk_count or failed == 5:
            said = now
            frames = done * CHUNK_FRAMES
            _say(
                f"{frames} frames, {frames / (now - begun):.0f} a second; {read_frames} were "
                f"whole; {failed} failures"
            )
        if failed == 5:
            return


def report(failure: Failure, seed: int) -> None:
    """Say what was found, and the command that finds it again."""
    start = failure.chunk * CHUNK_FRAMES
    _say(
        f"\n{failure.reason}\nbytes: {failure.data[:DATA_BYTES_SHOWN]!r}\n"
        f"again: make fuzz SEED={seed} START={start} FRAMES={CHUNK_FRAMES}"
    )


def _describe(error: BaseException) -> str:
    """The error with the line that raised it."""
    cause = error.__cause__ or error
    *_, (frame, line) = traceback.walk_tb(cause.__traceback__)
    return f"{type(error).__name__}: {error}\nat {frame.f_code.co_filename}:{line}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--start", type=int, default=0, help="first frame: goes on from there")
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    kept = run(arguments.seed, arguments.start, arguments.frames, arguments.processes)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
