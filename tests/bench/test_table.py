from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.compare import markdown
from tests.bench.table import replace_table


def peer(rates: list[float], first_send_s: float) -> dict[str, Any]:
    daemon = {"first_send_s": first_send_s, "started_mb": 80, "loaded_mb": 90}
    return {
        "sync-1 100 B": [report(rate) for rate in rates],
        "daemons": [{**daemon, "idle_cpu_percent": 0.0}],
    }


def report(rate: float) -> dict[str, float]:
    return {"rate": rate, "broker_cpu_us": 20.0, "p50_us": 150.0, "p99_us": 900.0}


def results(**peers: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2030-01-02",
        "machine": "2 cores",
        "rounds": 3,
        "seconds": 4,
        "peers": peers,
    }


def test_two_peers_have_a_ratio_of_medians() -> None:
    table = markdown(
        results(apache=peer([1000, 4000, 2000], 8.0), headrace=peer([5000, 3000, 4000], 0.5))
    )
    assert "| messages/s | headrace | apache | ratio |" in table
    assert "| sync-1 100 B | 4,000 (3,000 to 5,000) | 2,000 (1,000 to 4,000) | 2.00 |" in table
    assert "| sync-1 100 B | 0.15 (0.15 to 0.15) | 0.15 (0.15 to 0.15) | 1.00 |" in table
    assert "| start to first accepted send, s | 0.50 | 8.00 | 0.06 |" in table


def test_each_bar_says_whether_it_is_met() -> None:
    table = markdown(results(apache=peer([1000, 2000], 8.0), headrace=peer([5000, 4000], 0.5)))
    assert "| sync-1 100 B | messages/s, ratio | ≥ 1.1 | 3.00 | met |" in table
    assert "| sync-1 100 B | broker CPU, ratio | ≤ 0.5 | 1.00 | **missed** |" in table
    assert "| daemons | resident memory after the start, MB | ≤ 100 | 80.00 | met |" in table


def test_one_peer_has_no_ratio() -> None:
    table = markdown(results(apache=peer([1000], 8.0)))
    assert "| messages/s | apache |" in table
    assert "ratio |" not in table


def test_what_was_not_measured_has_no_table() -> None:
    assert "p99.9" not in markdown(results(apache=peer([1000], 8.0)))


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "growth.md"
    begin, end = "<!-- growth: begin -->", "<!-- growth: end -->"
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    replace_table(document, "new\n", "growth")
    assert document.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"


def test_a_document_without_markers_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "growth.md"
    document.write_text("no markers\n")
    with pytest.raises(ValueError, match="has no"):
        replace_table(document, "new\n", "growth")
    assert document.read_text() == "no markers\n"
