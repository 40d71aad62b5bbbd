from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench import results


def test_what_is_kept_is_small_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "latency.md"
    document.write_text("<!-- latency: begin -->\n<!-- latency: end -->\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "PAGES", tmp_path)
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


def test_every_kept_group_has_a_page_for_its_tables() -> None:
    for kept in results.RESULTS.glob("*.json"):
        text = (results.PAGES / f"{kept.stem}.md").read_text()
        assert f"<!-- {kept.stem}: begin -->" in text
        assert f"<!-- {kept.stem}: end -->" in text


def figures(table_rows: str) -> list[str]:
    """All numbers in Markdown table rows, without the first column, which names the row."""
    cells = [row.split("|")[2:] for row in table_rows.splitlines() if row.startswith("|")]
    return [figure for row in cells for cell in row for figure in re.findall(r"\d[\d,.]*", cell)]


def test_the_performance_page_quotes_the_published_figures() -> None:
    page = (results.ROOT / "docs" / "performance.md").read_text()
    sections = [part for part in page.split("\n## ") if part.startswith("Against ")]
    assert len(sections) == 3
    for section in sections:
        # The table's heading names versions.
        head, _, rows = section.partition("| ---")
        linked = re.findall(r"\]\((benchmarks/[^)]+)\)", head)
        published = "".join((results.ROOT / "docs" / link).read_text() for link in linked)
        assert figures(rows)
        assert missing(figures(rows), published) == []


def missing(quoted: list[str], published: str) -> list[str]:
    return [
        figure
        for figure in quoted
        if not re.search(rf"(?<![\d,.]){re.escape(figure)}(?![\d,.])", published)
    ]


def test_the_readme_quotes_the_performance_page() -> None:
    readme = (results.ROOT / "README.md").read_text()
    section = readme.partition("\n## How fast\n")[2].partition("\n## ")[0]
    rows = section.partition("| ---")[2]
    assert len(figures(rows)) == 15
    assert missing(figures(rows), (results.ROOT / "docs" / "performance.md").read_text()) == []
