"""Faults of real processes under load: ``python -m tests.faults.run kills --rounds 200``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.faults.faults import FAULTS, run
from tests.faults.history import HistoryBroken
from tests.simulation.history import PromiseBroken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        try:
            totals, waiting = run(
                chosen.fault, chosen.rounds, Random(chosen.seed), Path(folder), _say
            )
        except (HistoryBroken, PromiseBroken) as broken:
            sys.exit(f"seed {chosen.seed}: {broken}")
    _say(f"{chosen.rounds} {chosen.fault}, {time.monotonic() - began:.0f} s: {totals}")
    _say(str(waiting))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
