"""``make sim``: one seed after the other; a failure names the command that repeats it.

A seed stands for a whole cluster and its clients, or for many lives of one store; with ``--kind``
for those of another kind (``KINDS``).
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

import structlog

from tests.bench.processes import raise_open_files_limit
from tests.simulation.compacted_chains import Chains
from tests.simulation.compacted_lives import CompactedLives
from tests.simulation.followed_lives import FollowedLives
from tests.simulation.guarded_lives import GuardedLives
from tests.simulation.object_lives import ObjectLives
from tests.simulation.pop_lives import PopLives
from tests.simulation.simulation import PlainCluster
from tests.simulation.static_topics import StaticSimulation
from tests.simulation.store_lives import StoreLives
from tests.simulation.tiered_lives import TieredLives
from tests.simulation.totals import Outcome, Totals
from tests.simulation.waiting_lives import WaitingLives
from tests.simulation.world import Kind

# A cluster takes as long as a dozen stores.
CLUSTER_EVERY = 8
SAVE_EVERY = 50


ALL = "all"
KINDS: dict[str, type[Kind]] = {
    "chains": Chains,
    "cluster": PlainCluster,
    "compacted": CompactedLives,
    "followed": FollowedLives,
    "objects": ObjectLives,
    "pop": PopLives,
    "static": StaticSimulation,
    "store": StoreLives,
    "tiered": TieredLives,
    "users": GuardedLives,
    "waiting": WaitingLives,
}


def run_seed(kind: str, seed: int) -> Outcome:
    """Run what a seed of a kind stands for. Raises PromiseBroken, or whatever else ended it."""
    if kind == ALL:
        kind = "store" if seed % CLUSTER_EVERY else "cluster"
    return KINDS[kind].run_seed(seed)


def run_seeds(totals: Totals, seed_count: int, keep: Path, kind: str) -> None:
    """Go on with ``totals`` until they are of so many seeds, and save them in ``keep``."""
    while totals.seed_count < seed_count:
        seed = totals.first_seed + totals.seed_count
        try:
            totals.add(run_seed(kind, seed))
        except Exception:  # noqa: BLE001 - whatever it is, it is the finding
            command = f"make sim KIND={kind} SEED={seed} N=1"
            sys.stdout.write(f"{traceback.format_exc()}seed {seed}: {command}\n")
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
    parser.add_argument("--kind", choices=(ALL, *KINDS), default=ALL, help="what a seed stands for")
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
