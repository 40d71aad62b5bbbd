"""The examples of the documents work as they stand there.

Blocks marked ``sh`` and ``python`` run in order, in one folder, against a broker of the document's
own. Blocks marked ``console`` are sessions to look at; what they show has tests of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import headrace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "docs/quickstart.md",
    "docs/cli.md",
    "docs/embedded.md",
    "docs/store-tools.md",
]
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)\)")


def blocks(document: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each block that can be run."""
    text = (ROOT / document).read_text()
    for block in _BLOCK.finditer(text):
        yield text.count("\n", 0, block.start()) + 1, block[1], block[2]


def command(language: str, file: Path) -> list[str]:
    if language == "sh":
        return ["bash", "-euo", "pipefail", str(file)]
    if "def test_" in file.read_text():
        options = ["-p", "no:cacheprovider", "-o", "trio_mode=true", "-W", "error"]
        return [sys.executable, "-m", "pytest", "-q", *options, str(file)]
    return [sys.executable, "-W", "error", str(file)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_example_runs(document: str, tmp_path: Path) -> None:
    with headrace.embedded() as mq:
        environment = {
            **os.environ,
            "HEADRACE_NAMESERVER": mq.nameserver,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for line, language, text in blocks(document):
            file = tmp_path / f"block_{line}.{language[:2]}"
            file.write_text(text)
            done = subprocess.run(
                command(language, file),
                check=False,
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, f"{document}:{line}\n{done.stdout}\n{done.stderr}"
            assert language == "sh" or not done.stderr, f"{document}:{line}\n{done.stderr}"


def test_each_document_has_examples() -> None:
    for document in DOCUMENTS:
        assert len(list(blocks(document))) >= 4, document


@pytest.mark.parametrize(
    "document",
    sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))),
)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in _LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), f"{document}: {target}"
