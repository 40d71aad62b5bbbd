"""The published figures: each has its page, and pages that quote them quote them rightly."""

from __future__ import annotations

import re

import pytest

from tests.bench import results
from tests.bench.__main__ import GROUPS


@pytest.mark.parametrize("group", sorted(GROUPS.keys() - {"charts"}))
def test_every_group_has_a_page_for_its_tables(group: str) -> None:
    text = (results.PAGES / f"{group}.md").read_text()
    assert f"<!-- {group}: begin -->" in text
    assert f"<!-- {group}: end -->" in text


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
