"""The comparison of Spark sources: what is measured, what is promised, and what a failure says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench import spark
from tests.bench.spark import FULL, PEERS, SHORT, bars, cases, markdown, run_python
from tests.conformance.peer import PeerError

PYTHON = Path(sys.executable)


def report(rate: float, broker_cpu_us: float = 1.0) -> dict[str, float]:
    return {"rate": rate, "broker_cpu_us": broker_cpu_us}


def test_each_read_is_measured_on_all_cores_and_each_write_on_two() -> None:
    names = {
        cores: [case.name for case in cases(PEERS["headrace"], cores, SHORT) if not case.is_warm_up]
        for cores in spark.CORES
    }
    reads = ["batch 1024 B", "batch 100 B", "stream 1024 B", "stream 100 B"]
    writes = ["write 100 B", "copy 100 B", "copy-plain 100 B"]
    assert names[1] == [f"{name} local[1]" for name in reads]
    assert names[2] == [f"{name} local[2]" for name in (*reads, *writes)]


def test_writes_take_turns_each_into_a_topic_of_its_own() -> None:
    counted = [case for case in cases(PEERS["headrace"], 2, FULL) if case.target]
    goes = [case.target for case in counted if not case.is_warm_up]
    assert goes[:4] == ["write_0", "copy_0", "copy-plain_0", "write_1"]
    assert len(goes) == len(set(goes)) == 3 * FULL.write_goes


def test_bars_are_ratios_of_medians() -> None:
    ours = {
        "batch 1024 B local[1]": [report(500, 0.5), report(700, 0.7), report(600, 0.6)],
        "copy 100 B local[2]": [report(80)],
        "copy-plain 100 B local[2]": [report(100)],
        "write 100 B local[2]": [report(600_000)],
    }
    theirs = {"batch 1024 B local[1]": [report(200, 0.5)]}
    found = {
        (bar.case, bar.beside): (bar.measured, bar.is_met)
        for bar in bars({"headrace": ours, "kafka": theirs})
    }
    assert found["batch 1024 B local[1]", "Kafka"] == ("3.00 ×", True)
    assert found["batch 1024 B local[1]", "Kafka's broker"] == ("0.60 µs", False)
    assert found["write 100 B local[2]", ""] == ("600,000/s", True)
    assert ("20%", False) in found.values()


def test_the_table_has_a_line_for_each_case_and_peer() -> None:
    peers = {"kafka": {"a": [report(1)]}, "headrace": {"a": [report(2), report(4)]}}
    table = markdown({"date": "d", "machine": "m", "rounds": 2, "peers": peers})
    assert "| a | kafka | 1 |" in table
    assert "| a | headrace | 3 (2 to 4) |" in table


def test_a_program_that_fails_says_why_after_what_it_said() -> None:
    lines = run_python(PYTHON, "tests.bench.spark_job", {"format": "headrace"})
    with pytest.raises(PeerError, match=r"(?s)spark_job failed: .*ValidationError.*`address`"):
        next(lines)
    with pytest.raises(PeerError, match="run `make bench-spark`"):
        next(run_python(Path("/no/python"), "tests.bench.spark_job", {}))
