"""``make sim``: simulations one after the other; a failure names the seed that repeats it."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import traceback

import structlog

from tests.simulation.simulation import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    failed = [seed for seed in seeds if not _holds(seed)]
    return 1 if failed else 0


def _holds(seed: int) -> bool:
    try:
        result = run(seed)
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        sys.stdout.write(f"{traceback.format_exc()}seed {seed} failed: make sim SEED={seed} N=1\n")
        return False
    what = ", ".join(f"{name} {value}" for name, value in result._asdict().items())
    sys.stdout.write(f"seed {seed}: {what}\n")
    sys.stdout.flush()
    return True


if __name__ == "__main__":
    sys.exit(main())
