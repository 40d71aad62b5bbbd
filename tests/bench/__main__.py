"""``python -m tests.bench [GROUP] [OPTIONS]``: the groups are in the table below."""

from __future__ import annotations

import sys
from importlib import import_module

from tests.bench.driver import DriverError
from tests.conformance.peer import PeerError
from tests.support.building import BuildFailed

# Group of cases -> module whose ``main`` takes the options; the first is the default.
GROUPS = {
    "compare": "compare",
    "latency": "latency",
    "growth": "growth",
    "store": "store",
    "features": "features",
    "secure": "secure",
    "quotas": "quotas",
    "share": "share",
    "python-clients": "python_clients",
    "spark": "spark",
    "charts": "charts",
}


def main(arguments: list[str]) -> None:
    group, options = "compare", arguments
    if arguments and not arguments[0].startswith("-"):
        group, *options = arguments
    if group not in GROUPS:
        sys.exit(f"no group of cases {group!r}: choose from {', '.join(GROUPS)}")
    try:
        import_module(f"tests.bench.{GROUPS[group]}").main(options)
    except (PeerError, BuildFailed, DriverError) as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main(sys.argv[1:])
