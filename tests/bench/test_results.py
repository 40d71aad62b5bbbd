from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench import results

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_is_kept_is_small_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "performance.md"
    document.write_text("<!-- latency: begin -->\n<!-- latency: end -->\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "DOCUMENT", document)
    assert results.kept("latency") is None
    report = {"rate": 12345.678901, "errors": 0}
    results.keep(
        "latency", {"peers": {"headrace": {"paced": [report, report], "e2e": [report]}}}, "TABLE"
    )
    rounded = {"rate": 12346.0, "errors": 0}
    assert results.kept("latency") == {
        "peers": {"headrace": {"paced": [rounded, rounded], "e2e": [rounded]}}
    }
    assert "TABLE" in document.read_text()
    assert len((tmp_path / "results" / "latency.json").read_text().splitlines()) == 2


def test_what_the_host_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spent, stolen = results._ticks()
    assert 0 <= stolen < spent
    monkeypatch.setattr(results, "_BEGAN", (1000, 100))
    monkeypatch.setattr(results, "_ticks", lambda: (3000, 250))
    assert results.stamp()["machine"].endswith(", 8% of it taken by its host")


def test_every_group_has_its_place_in_the_document() -> None:
    text = results.DOCUMENT.read_text()
    for group in ("compare", "latency", "growth", "abuse"):
        assert f"<!-- {group}: begin -->" in text
        assert f"<!-- {group}: end -->" in text
