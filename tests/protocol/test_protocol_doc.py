"""docs/protocol.md has the sections that the code cites and every request that is served."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.support.broker import BrokerUnderTest
from tests.support.nameserver import NameServerUnderTest

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "protocol.md").read_text()


def section(title: str) -> str:
    """The text below a title, up to the next of its level."""
    (level,) = re.findall(rf"^(#+) {title}$", DOC, re.MULTILINE)
    text = re.split(rf"^{level} {title}$", DOC, flags=re.MULTILINE)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", text, flags=re.MULTILINE)[0]


def test_cited_sections_are_there() -> None:
    cited = {
        title
        for package in ("protocol", "broker", "nameserver", "clients")
        for file in (ROOT / package).rglob("*.py")
        for title in re.findall(r'docs/protocol\.md "([^"]+)"', file.read_text())
    }
    assert len(cited) > 5
    assert cited <= set(re.findall(r"^#+ (.+)$", DOC, re.MULTILINE))


def documented(title: str) -> set[int]:
    """The codes in the first column of a table."""
    rows = re.findall(r"^\| ([\d, ]+) \|", section(title), re.MULTILINE)
    return {int(code) for row in rows for code in row.split(",")}


def served(codes: Iterable[int]) -> set[int]:
    return {int(code) for code in codes}


def test_every_request_of_the_broker_is_described(tmp_path: Path) -> None:
    broker = BrokerUnderTest(tmp_path)
    assert documented("Broker") == served(broker.registry.functions)
    broker.close()


def test_every_request_of_the_nameserver_is_described() -> None:
    assert documented("Nameserver") == served(NameServerUnderTest().registry.functions)
