"""``make sim``: one seed after the other; a failure names the command that repeats it.

A seed stands for a whole cluster and its clients, or for many lives of one store; with
``--kind=followed`` for many lives of one store with a follower, with ``--kind=waiting`` for many
lives of one broker with messages that wait, with ``--kind=compacted`` for those of one with a
compacted topic, with ``--kind=chains`` for brokers with a compacted static topic, with
``--kind=static`` for a cluster with a static topic whose queues move, with ``--kind=tiered`` for
many lives of one broker with tiered topics, with ``--kind=objects`` for those of one whose tier is
in a bucket.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tests.bench.processes import raise_open_files_limit
from tests.simulation import (
    compacted_chains,
    compacted_lives,
    followed_lives,
    object_lives,
    simulation,
    static_topics,
    store_lives,
    tiered_lives,
    waiting_lives,
)
from tests.simulation.totals import Outcome, Totals

if TYPE_CHECKING:
    from collections.abc import Callable

# A cluster takes as long as a dozen stores.
CLUSTER_EVERY = 8
SAVE_EVERY = 50


def run_seed(seed: int) -> Outcome:
    """Run what a seed stands for. Raises PromiseBroken, or whatever else ended it."""
    return (simulation if seed % CLUSTER_EVERY == 0 else store_lives).run(seed)


KINDS: dict[str, Callable[[int], Outcome]] = {
    "all": run_seed,
    "chains": compacted_chains.run,
    "compacted": compacted_lives.run,
    "followed": followed_lives.run,
    "objects": object_lives.run,
    "static": static_topics.run,
    "tiered": tiered_lives.run,
    "waiting": waiting_lives.run,
}


def run_seeds(totals: Totals, seed_count: int, keep: Path, kind: str = "all") -> None:
    """Go on with ``totals`` until they are of so many seeds, and save them in ``keep``."""
    run = KINDS[kind]
    command = "make sim SEED={} N=1"
    if run is not run_seed:
        command = f"python -m tests.simulation.run --kind={kind} --seed={{}} --count=1"
    while totals.seed_count < seed_count:
        seed = totals.first_seed + totals.seed_count
        try:
            totals.add(run(seed))
        except Exception:  # noqa: BLE001 - whatever it is, it is the finding
            sys.stdout.write(f"{traceback.format_exc()}seed {seed}: {command.format(seed)}\n")
            totals.add_failed(seed)
        if totals.seed_count % SAVE_EVERY == 0:
            sys.stderr.write(f"{totals.seed_count} seeds, {len(totals.failed)} failed\n")
            totals.save(keep)
    totals.save(keep)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--keep", type=Path, help="go on with the totals in this file")
    parser.add_argument("--kind", choices=KINDS, default="all", help="what a seed stands for")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable()
    raise_open_files_limit()
    with tempfile.TemporaryDirectory() as folder:
        keep: Path = arguments.keep or Path(folder) / "totals.json"
        totals = Totals.load(keep) if keep.exists() else Totals(arguments.seed)
        run_seeds(totals, arguments.count, keep, arguments.kind)
    sys.stdout.write(f"{totals.as_text()}\n")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings are in another order in each process otherwise.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.run", *sys.argv[1:]])
    sys.exit(main())
