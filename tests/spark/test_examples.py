"""The scripts of examples/ run as they stand there."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from headrace.config import NAMESERVER_VARIABLE
from headrace.embedded import Embedded

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each must print.
SAYS = {
    "spark_batch.py": ["750 orders are paid", "15 customers;"],
    "spark_table.py": ["20 customers spent 2280 euros", "15 customers are left"],
    "spark_enrich.py": ['{"user":"u1","name":"Ann"}', '"name":"Anna"}', '"name":"Bob"}'],
    # Windows of five minutes but the last, of three pages.
    "spark_stream.py": ["1800 clicks read", "1800 more clicks read", "|page-2|", "|100 ", "lag: 0"],
}


@pytest.mark.parametrize(
    "name",
    [
        # A stream's triggers take seconds.
        pytest.param(path.name, marks=[pytest.mark.long] if "stream" in path.name else [])
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
@pytest.mark.usefixtures("spark")
def test_an_example_runs(
    name: str,
    mq: Embedded,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(NAMESERVER_VARIABLE, mq.nameserver)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    for text in SAYS[name]:
        assert text in said, said
