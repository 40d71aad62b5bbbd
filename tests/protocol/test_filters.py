"""SQL92 filters: Apache's answers, records one by one and in blocks, and bad input."""

from __future__ import annotations

import gzip
import inspect
import json
import random
import sys
import weakref
from typing import TYPE_CHECKING

import pytest

from headrace_protocol.columns import RecordColumns
from headrace_protocol.filters import blocks, codes, java_numbers, nodes
from headrace_protocol.filters.expression import (
    TEXT_BYTES_MAX,
    Expression,
    compiled,
    conditions_of,
)
from headrace_protocol.filters.parser import OPERANDS_MAX, parse
from headrace_protocol.filters.tokens import TOKENS_MAX, FilterError
from headrace_protocol.message import decode_properties, encode_record
from tests.support import filters
from tests.support.filter_answers import ANSWERS, WITH_REST
from tests.support.seeds import seeds

if TYPE_CHECKING:
    from typing import Any

LETTERS = "FTNE"


@pytest.fixture(scope="module")
def answered() -> dict[str, Any]:
    """What Apache's classes answered."""
    found: dict[str, Any] = json.loads(gzip.decompress(ANSWERS.read_bytes()))
    return found


def columns(properties: list[bytes]) -> RecordColumns:
    """Records with these properties."""
    records = [
        encode_record(topic="T", queue_id=0, body=b"", properties=each) for each in properties
    ]
    return RecordColumns.from_records(b"".join(records))


def utf8(texts: list[str]) -> list[bytes]:
    """The texts as records have them."""
    return [text.encode() for text in texts]


def test_every_answer_is_that_of_apache(answered: dict[str, Any]) -> None:
    """True, false, null, an exception or a refusal, for each expression and record."""
    records = [decode_properties(text.encode()) for text in answered["records"]]
    wrong = {}
    for text, letters in answered["answers"].items():
        try:
            node = parse(text)
        except FilterError:
            ours = "refused"
        else:
            ours = "".join(LETTERS[nodes.evaluate(node, each)] for each in records)
        if ours != letters:
            wrong[text] = ours
    assert wrong == dict.fromkeys(WITH_REST, "refused")
    assert len(answered["answers"]) > 600


@pytest.mark.parametrize("seed", seeds(40))
def test_a_block_has_the_answers_of_its_records(seed: int) -> None:
    """Columns and single records never differ."""
    seeded = random.Random(seed)
    texts = [filters.properties_text(seeded) for _ in range(200)]
    records = columns(utf8(texts))
    done = 0
    while done < 25:
        text = filters.expression(seeded)
        try:
            expression = Expression(text, parse(text))
        except FilterError:
            continue
        done += 1
        singly = [expression.matches(decode_properties(each.encode())) for each in texts]
        assert expression.mask(records).tolist() == singly, text
        assert expression.mask(records.select(slice(0, 3))).tolist() == singly[:3], text


def test_a_block_of_the_fixture_has_its_answers(answered: dict[str, Any]) -> None:
    """The columns too."""
    records = columns(utf8(answered["records"]))
    for text, letters in answered["answers"].items():
        if letters != "refused" and text not in WITH_REST:
            mask = blocks.matching(conditions_of(parse(text)), records)
            assert [letter == "T" for letter in letters] == mask.tolist(), text


def test_leaves_remember_what_they_have_judged() -> None:
    """No more than so many values: those of two blocks are too many together."""
    judged: list[str | None] = []

    def judge(text: str | None) -> int:
        judged.append(text)
        return codes.FALSE if text == "9" else codes.TRUE

    for first, fresh in ((0, 258), (0, 0), (300, 257), (0, 258), (150, 128), (0, 0)):
        values = [*range(first, first + 300)] * 2
        texts = [f"a\x01{value}\x02" if value % 7 else "" for value in values]
        judged.clear()
        mask = blocks.matching((nodes.Leaf("a", judge),), columns(utf8(texts)))
        assert mask.tolist() == [value != 9 for value in values]
        assert len(judged) == len({*judged}) == fresh


def test_properties_with_bytes_that_are_no_text() -> None:
    """They are compared as they are shown."""
    records = columns([b"a\x01\xff\xfe\x02b\x015\x02", b"a\x01x\x02"] * 10)
    expression = compiled("a <> 'x' AND b = 5")
    assert expression.mask(records).tolist() == [True, False] * 10


BAD = {
    "": "line 1, column 1: it is empty",
    " \n\t": "line 2, column 2: it is empty",
    "-- only a comment": "it is empty",
    "/* only a comment */": "it is empty",
    "/* open": "a comment that has no end",
    "a = 'open": "line 1, column 5: a text in quotes that has no end",
    "a >": "line 1, column 4: expected a property, a value, NOT or (, found the end",
    "a > 5\nAND AND b": "line 2, column 5: expected a property, a value, NOT or (, found 'AND'",
    "a > 5 b = 6": "line 1, column 7: expected AND, OR, a comparison or the end, found 'b'",
    "a IN (5)": "line 1, column 7: expected a text in single quotes, found '5'",
    "a IN ('x'": "expected ), found the end",
    "a IN 'x'": "expected (, found \"'x'\"",
    "a BETWEEN 1 OR 2": "expected AND, found 'OR'",
    "a BETWEEN 5 AND 1": "column 3: BETWEEN 5 AND 1: the first must not be greater",
    "a NOT > 5": "expected BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH behind NOT, found '>'",
    "a IS 5": "expected NULL, found '5'",
    "a > 'x'": "column 3: > compares numbers, not the text 'x'",
    "a > TRUE": "> compares numbers, not TRUE",
    "a > NULL": "> compares numbers, not NULL",
    "a > 1 > 2": "> compares numbers, not a condition",
    "a = NULL": "NULL equals nothing: use IS NULL",
    "TRUE = 5": "TRUE can't be compared with 5",
    "5": "5 is a value, not a condition",
    "a AND 'x'": "column 3: the text 'x' is a value, not a condition",
    "NOT -a": "NULL is a value, not a condition",
    "5 IN ('5')": "IN is for properties, not for 5",
    "-(a > 5)": "the minus sign is for numbers, not for conditions",
    "a > 1e999": "1e999 is too large",
    "a > 0.0": "0.0: a double can't be 0 here, write 0",
    "a > 9223372036854775808": "is greater than 9223372036854775807",
    "a > " + "9" * 5000: "is greater than 9223372036854775807",
    "a == 5": "expected a property, a value, NOT or (, found '='",
    "a ! 5": "column 3: unexpected character '!'",
    "a\x01 = 5": "column 2: unexpected character '\\x01'",
    "é = 5": "column 1: unexpected character 'é'",
    "\ud800": "unexpected character",
    "(" * 10_000: "column 101: nested deeper than 100 levels",
    "NOT " * 10_000: "nested deeper than 100 levels",
    "- " * 10_000: "nested deeper than 100 levels",
    "a" + " = a" * 1000: "nested deeper than 100 levels",
    "a" + " CONTAINS 'x'" * 1000: "nested deeper than 100 levels",
    "a IN ('x'" + ", /**/ 'x'" * 4000 + ")": f"more than {TOKENS_MAX} words and signs",
    "/**/" * 16_000 + "a": f"column 40001: more than {TOKENS_MAX} words and signs",
    "a IN ('x', 'y', z)": "expected a text in single quotes, found 'z'",
    "a IN ('x', 'y'": "expected ), found the end",
    "a > 5 AND " * 1000 + "a": f"more than {OPERANDS_MAX} operands",
    "a = '" + "x" * 1_000_000 + "'": f"it has over {TEXT_BYTES_MAX} bytes",
    "a = '" + "é" * (TEXT_BYTES_MAX // 2) + "'": f"it has over {TEXT_BYTES_MAX} bytes",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_bad_filter_names_its_place(text: str) -> None:
    """With line, column, and what was expected."""
    with pytest.raises(FilterError) as raised:
        compiled(text)
    assert BAD[text] in str(raised.value)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("separator", [",", " , ", ",/* then */", "\n,\n"])
def test_a_list_may_have_any_form(separator: str) -> None:
    """Spaces and comments between its texts, and quotes in them."""
    texts = ("x", "it''s", "", "''", "a, ''b''")
    for count in range(1, len(texts) + 1):
        listed = separator.join(f"'{each}'" for each in texts[:count])
        expression = compiled(f"a IN ( {listed} ) AND b NOT IN({listed})")
        for number, each in enumerate(texts):
            found = expression.matches({"a": each.replace("''", "'"), "b": "none"})
            assert found is (number < count)
        assert not expression.matches({"a": "x", "b": "x"})


def test_a_list_takes_all_the_text() -> None:
    """As many texts as fit; a list is no condition by itself."""
    texts = [f"{number:x}" for number in range(9000)]
    expression = compiled("a IN (" + ",".join(f"'{each}'" for each in texts) + ")")
    assert expression.matches({"a": texts[-1]})
    assert not expression.matches({"a": "none"})
    for text in ("('x', 'y')", "a = ('x', 'y')", "a IN (('x', 'y'))"):
        with pytest.raises(FilterError, match="expected"):
            compiled(text)


def test_no_depth_reaches_the_limit_of_the_interpreter() -> None:
    """The deepest filter compiles and is evaluated far below it."""
    deepest = "(TRUE AND " * 98 + "a < 5" + ")" * 98
    limit = sys.getrecursionlimit()
    expression = compiled(deepest)
    sys.setrecursionlimit(len(inspect.stack()) + 500)
    try:
        Expression(deepest, parse(deepest))
        assert expression.matches({"a": "1"})
    finally:
        sys.setrecursionlimit(limit)


def test_filters_are_compiled_once_and_a_thousand_are_kept() -> None:
    """The same object for the same text; long ones are kept while they are in use."""
    assert compiled("a > 5") is compiled("a > 5")
    for number in range(1100):
        compiled(f"a > {number}")
    long = "a = '" + "x" * 2000 + "'"
    expression = compiled(long)
    assert compiled(long) is expression
    unused = weakref.ref(expression)
    del expression
    assert unused() is None
    assert compiled("a > 5 AND b = c OR NOT (d IN ('x')) AND TRUE").names == {"a", "b", "c", "d"}


def test_the_order_of_conditions_does_not_matter_at_the_top() -> None:
    """An error in one of them hides no match, and makes none."""
    records = columns([b"a\x01%b\x02b\x01x\x02" % value for value in (b"5", b"bad", b"1")] * 10)
    for text in ("a > 2 AND b = 'x'", "b = 'x' AND a > 2", "(b = 'x' OR a > 9) AND a > 2"):
        assert compiled(text).mask(records).tolist() == [True, False, False] * 10


@pytest.mark.parametrize("table", [codes.AND, codes.OR, codes.EQUAL], ids=["and", "or", "equal"])
def test_an_error_stays_one(table: bytes) -> None:
    """On the left nothing hides it."""
    assert set(table[4 * codes.ERROR :]) == {codes.ERROR}


def test_numbers_of_java() -> None:
    """Those that random values rarely are."""
    assert java_numbers.integer("+" + "0" * 5000 + "7") == 7
    assert java_numbers.integer("9" * 5000) is None
    assert java_numbers.integer("--5") is None
    assert java_numbers.long("-9223372036854775808") == -(1 << 63)
    assert java_numbers.double("0x1p99999") == java_numbers.double("Infinity")
    assert java_numbers.double("-0x1p99999") == java_numbers.double("-Infinity")
    assert java_numbers.double("1e99999") == java_numbers.double("Infinity")
    assert java_numbers.double("1_0") is None


@pytest.mark.parametrize("digits", ["1", ".1", "1.1", "0x1", "1e1", "\u0661"])
def test_a_number_takes_time_by_its_length(digits: str) -> None:
    """With so many digits a search that tries each place twice would take hours."""
    assert java_numbers.double(digits + "1" * 500_000 + "x") is None
    assert java_numbers.integer(digits + "1" * 500_000 + "x") is None
