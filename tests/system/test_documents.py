"""The examples of the documents work as they stand there, each against a broker of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import headrace
from tests.support.documents import ROOT, blocks, run_blocks
from tests.support.running_brokers import brokers_in_thread

pytestmark = pytest.mark.slow

DOCUMENTS = [
    "README.md",
    "docs/quickstart.md",
    "docs/cli.md",
    "docs/concepts.md",
    "docs/embedded.md",
    "docs/migrating.md",
    "docs/operations.md",
    "docs/security.md",
    "docs/guarantees.md",
    "docs/retention.md",
    "docs/store-tools.md",
]
_LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_example_runs(document: str, tmp_path: Path) -> None:
    with headrace.embedded() as mq:
        run_blocks(document, tmp_path, mq.nameserver, Path(sys.executable))


def test_the_examples_of_static_topics_run(tmp_path: Path) -> None:
    with brokers_in_thread(tmp_path, ["broker-a", "broker-b", "broker-c"]) as nameserver:
        run_blocks("docs/static-topics.md", tmp_path, nameserver, Path(sys.executable))


def test_the_examples_of_tiered_storage_run(tmp_path: Path) -> None:
    settings = {
        "message_store_plug_in": "tieredstore",
        "tiered_backend_service_provider": "posix",
        "tiered_store_file_path": tmp_path / "tier",
        "tiered_store_group_commit_timeout": 100,
    }
    with brokers_in_thread(tmp_path, ["broker-a"], **settings) as nameserver:
        run_blocks("docs/tiering.md", tmp_path, nameserver, Path(sys.executable))


def test_each_document_has_examples() -> None:
    for document in DOCUMENTS:
        assert len(list(blocks(document))) >= 1, document


@pytest.mark.parametrize(
    "document",
    sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))),
)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in _LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), f"{document}: {target}"
