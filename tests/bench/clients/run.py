"""One client process: ``python -m tests.bench.clients.run JOB`` with a ``Job`` as JSON.

Prints its ``Report`` as JSON. Only the client that is measured is imported.
"""

from __future__ import annotations

import importlib
import sys

import msgspec

from tests.bench.clients.job import Job

MODULES = {"aiokafka": "with_aiokafka", "confluent": "with_confluent"}


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    name = MODULES.get(job.work.partition("-")[0], "with_headrace")
    works = importlib.import_module(f"tests.bench.clients.{name}").WORKS
    sys.stdout.write(msgspec.json.encode(works[job.work](job)).decode() + "\n")


if __name__ == "__main__":
    main()
