"""The examples of the documents, run as they stand there.

Blocks marked ``sh`` and ``python`` run in order, in one folder. Blocks marked ``console`` are
sessions to look at; what they show has tests of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each block that can be run."""
    text = (ROOT / document).read_text()
    for block in _BLOCK.finditer(text):
        yield text.count("\n", 0, block.start()) + 1, block[1], block[2]


def run_blocks(document: str, folder: Path, nameserver: str, python: Path) -> None:
    """Run a document's blocks against a broker, with ``headrace`` from beside ``python``."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HEADRACE_NAMESERVER": nameserver,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    for line, language, text in blocks(document):
        file = folder / f"block_{line}.{language[:2]}"
        file.write_text(text)
        done = subprocess.run(
            _command(language, file, python),
            check=False,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{document}:{line}\n{done.stdout}\n{done.stderr}"
        assert language == "sh" or not done.stderr, f"{document}:{line}\n{done.stderr}"


def _command(language: str, file: Path, python: Path) -> list[str]:
    if language == "sh":
        return ["bash", "-euo", "pipefail", str(file)]
    if "def test_" in file.read_text():
        options = ["-p", "no:cacheprovider", "-p", "no:asyncio", "-o", "trio_mode=true"]
        options += ["-W", "error"]
        return [str(python), "-m", "pytest", "-q", *options, str(file)]
    return [str(python), "-W", "error", str(file)]
