"""Makes ``tests/protocol/filter_answers.json.gz``: what Apache's classes answer to filters.

Run it as ``python -m tests.support.filter_answers``; it needs a JDK and Maven.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import subprocess
from pathlib import Path

from tests.conformance.peer import java_build
from tests.support import filters

ANSWERS = Path(__file__).parents[1] / "protocol" / "filter_answers.json.gz"
SEED = 1
RECORDS = 80
EXPRESSIONS = 600
# Apache's parser stops at the end of a condition, and ignores the rest; ours refuses it.
WITH_REST = (
    *("a LIKE 'x'", "a + 1 > 5", "a > 007", "a = 0L", "a = 00", "a > 5 b", "a > 5 'x'"),
    *("a > 5LL", "a > 5f", "a > 0x10", "a > 5)"),
)
# What random ones rarely have.
SPECIAL = (
    *("", " ", "-- nothing", "/* nothing */", "/**/a IS NULL", "/* a * b **/ a IS NULL"),
    *("a > 5 -- five", "a -- a\n> 5", "a\n>\t5\f\r", "a > 5 /* open", "a > --5\n 4", "a>-5"),
    *("a", "NOT a", "NOT NOT a", "a AND b", "a OR TRUE", "NULL", "TRUE", "FALSE", "NOT NULL"),
    *("'x'", "5", "-5", "-a", "NOT -a", "NOT 5", "a > 5 > 6", "a = 5 = TRUE", "a = b = price"),
    *("a IS NULL IS NULL", "(a > 5) IS NULL", "5 IS NULL", "'x' IS NOT NULL", "-a IS NULL"),
    *("NOT a = 5", "NOT a > 5", "NOT (a = 5)", "NOT a IS NULL", "a NOT b", "a NOT = 5"),
    *("a IN ()", "a IN ('x',)", "a IN (5)", "a IN 'x'", "5 IN ('5')", "a IN ('5') IN ('5')"),
    *("a CONTAINS", "a CONTAINS 5", "a CONTAINS b", "'abc' CONTAINS 'b'", "5 CONTAINS '5'"),
    *("(a > 5) CONTAINS 'x'", "a CONTAINS 'x' CONTAINS 'y'", "a > +5"),
    *("a BETWEEN 5 AND 1", "a BETWEEN -1 AND -5", "a BETWEEN b AND price", "5 BETWEEN 1 AND 9"),
    *("a BETWEEN 'a' AND 'b'", "a BETWEEN NULL AND 5", "a BETWEEN 1 AND 5 AND b = '5'"),
    *("a NOT BETWEEN 9 AND 1", "a BETWEEN 1 OR 5", "a BETWEEN 1.5 AND 7", "a BETWEEN 7.5 AND 7"),
    *WITH_REST,
    *("a = 0.0", "a > 0.0", "a > 0", "a > 1e999", "a > 1e-999", "a > 9223372036854775808"),
    *("a > 9223372036854775807L", "a > 5l", "a < 00.5", "a > 1e5", "a > 1.e5"),
    *("a >= -2147483648", "a >= -2147483647", "a >= -9223372036854775807", "a = - - 5"),
    *("a = 'it''s'", "a = 'open", "a = ''", "a = '\n'", "a = 'é'", "é = 5", 'a = "x"', "a == 5"),
    *("a != 5", "a <= 5", "a =< 5", "a < = 5", "a <> 5", "a < > 5", "(a > 5", "a;"),
    *("a.b = 5", "$a = 5", "_a = 5", "5a = 5", "A = '5'", "TRUE = a", "a = TRUE", "FALSE = a"),
    *("TRUE = 5", "5 = TRUE", "'true' = TRUE", "TRUE = 'true'", "TRUE = FALSE", "NULL = a"),
    *("a = NULL", "a <> NULL", "5 = '5'", "'5' = 5", "'x' = 5", "5 = 5.0", "5L = 5", "5 > 4.9"),
    *("'5' > 4", "a > 'x'", "a > TRUE", "a > NULL", "TRUE > a", "-a > 5", "-a = 5", "5 = -a"),
    *("a = -b", "-a = -b", "(a > 5) = (b > 5)", "(a > 5) = b", "b = (a > 5)", "5 = (a > 5)"),
    *("(a > 5) = 5", "(a > 5) = 'true'", "'true' = (a > 5)", "(a > 5) = -b", "-b = (a > 5)"),
    *("(a > 5) <> (b > 5)", "a between 1 and 5", "a is not null", "a contains 'U'"),
    *("-'x' IS NULL", "-TRUE IS NULL", "+a = '5'", "+(a > 5)", "+TRUE", "a = +b", "a > b", "a = a"),
    *("a Not In ('5')", "((a)) > 5"),
    *("a <> a", "a > 5 AND", "AND a > 5", "a > 5 OR OR a > 5", "()", "(())", "(a) = 5"),
)


def inputs() -> tuple[list[str], list[str]]:
    """Properties of records, and expressions."""
    seeded = random.Random(SEED)
    records = ["", *(filters.properties_text(seeded) for _ in range(RECORDS))]
    return records, [*SPECIAL, *(filters.expression(seeded) for _ in range(EXPRESSIONS))]


def ask(records: list[str], expressions: list[str], classpath: str) -> list[str]:
    """The line of ``FilterAnswers`` for each expression."""
    lines = [("R", text) for text in records] + [("E", text) for text in expressions]
    sent = "".join(f"{mark}{base64.b64encode(text.encode()).decode()}\n" for mark, text in lines)
    command = ["java", "-cp", classpath, "headrace.conformance.FilterAnswers"]
    return subprocess.run(
        command, input=sent, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def main() -> None:
    """Write the file."""
    build = java_build()
    records, expressions = inputs()
    answers = ask(records, expressions, f"{build / 'classes'}:{build / 'lib'}/*")
    table = dict(zip(expressions, answers, strict=True))
    text = json.dumps({"records": records, "answers": table}, ensure_ascii=False, indent=0)
    ANSWERS.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
