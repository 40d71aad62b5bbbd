"""Lines, NDJSON and CSV become messages; what makes none is named by file, line and column."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admin.rows import LINE_BYTES_MAX, BadRow, Columns, RowFormat, format_of, read_messages

DEEP = "[" * 100_000 + "]" * 100_000


def read(
    text: str | bytes, row_format: RowFormat, columns: Columns | None = None
) -> list[tuple[bytes, str, str]]:
    data = text.encode() if isinstance(text, str) else text
    lines = [line for line in re.split(rb"(?<=\n)", data) if line]
    found = read_messages(lines, "in", row_format, "T", columns or Columns())
    return [(message.body, message.key, message.tag) for message in found]


def bad_row(text: str | bytes, row_format: RowFormat, columns: Columns | None = None) -> BadRow:
    with pytest.raises(BadRow) as caught:
        read(text, row_format, columns)
    return caught.value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.csv", RowFormat.CSV),
        ("a.CSV", RowFormat.CSV),
        ("a.ndjson", RowFormat.NDJSON),
        ("a.jsonl", RowFormat.NDJSON),
        ("a.txt", RowFormat.LINES),
        ("standard input", RowFormat.LINES),
    ],
)
def test_a_file_name_tells_the_format(name: str, expected: RowFormat) -> None:
    assert format_of(name) is expected


def test_each_line_is_a_body_and_blank_ones_are_skipped() -> None:
    assert read(b"a\r\n\nb c\n\xff\nlast", RowFormat.LINES) == [
        (b"a", "", ""),
        (b"b c", "", ""),
        (b"\xff", "", ""),
        (b"last", "", ""),
    ]


def test_ndjson_keeps_the_line_as_it_is() -> None:
    text = '{"id": 7, "kind":"x", "none": null}\n\n  {"id":"8","kind":"ü","none":1}\n'
    found = read(text, RowFormat.NDJSON, Columns(key="id", tag="kind"))
    assert found == [
        (b'{"id": 7, "kind":"x", "none": null}', "7", "x"),
        ('{"id":"8","kind":"ü","none":1}'.encode(), "8", "ü"),
    ]
    assert read(text, RowFormat.NDJSON, Columns(key="none"))[0][1] == ""


def test_a_field_can_be_the_body() -> None:
    text = '{"b":"text"}\n{"b":{"c":[1,"ü"]}}\n'
    assert [body for body, _, _ in read(text, RowFormat.NDJSON, Columns(body="b"))] == [
        b"text",
        '{"c":[1,"ü"]}'.encode(),
    ]


def test_numbers_keep_their_digits() -> None:
    numbers = ["1.10", "1e999", "-0", "1" * 5000, "123456789012345678901234567890"]
    text = "".join(f'{{"n":{number},"l":[{number}]}}\n' for number in numbers)
    found = read(text, RowFormat.NDJSON, Columns(key="n", body="l"))
    assert found == [(f"[{number}]".encode(), number, "") for number in numbers]


def test_other_values_become_json() -> None:
    text = '{"t":true,"f":false,"l":[1, {"a" : null}],"n":NaN}\n'
    for name, expected in (("t", "true"), ("f", "false"), ("l", '[1, {"a" : null}]')):
        (found,) = read(text.replace("NaN", "0"), RowFormat.NDJSON, Columns(key=name))
        assert found[1] == expected
    assert read(text, RowFormat.NDJSON, Columns(key="n"))[0][1] == "NaN"


def test_a_line_loses_only_its_line_end() -> None:
    assert [body for body, _, _ in read(b"a\r\r\nb \nc\r\n", RowFormat.LINES)] == [
        b"a\r", b"b ", b"c"
    ]  # fmt: skip


LINE_ENDS = ("\n", "\r\n", "\r", "\n\n", "\n\r", "\u2028", "\x85", "\x0b")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("inner", LINE_ENDS, ids=ascii)
def test_line_ends_inside_quotes_stay_in_the_value(inner: str, end: str) -> None:
    value = f"one{inner}two{inner}"
    text = f'id,body{end}1,"{value}"{end}2,"{inner}"{end}3,plain{end}'
    found = read(text, RowFormat.CSV, Columns(key="id", body="body"))
    assert [(key, body.decode()) for body, key, _ in found] == [
        ("1", value), ("2", inner), ("3", "plain")
    ]  # fmt: skip


@given(st.lists(st.tuples(st.text('ab"\r\n, ü', min_size=1), st.text("x'\n\r\"")), min_size=1))
def test_what_the_csv_module_writes_is_read_back(rows: list[tuple[str, str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("body", "note"), *rows])
    found = read(text.getvalue(), RowFormat.CSV, Columns(body="body"))
    assert [body.decode() for body, _, _ in found] == [body for body, _ in rows]


def test_a_value_of_csv_is_as_long_as_a_body() -> None:
    value = "x" * (4 * 1024 * 1024)
    ((body, _, _),) = read(f'body\n"{value}"\n', RowFormat.CSV, Columns(body="body"))
    assert body.decode() == value


def test_csv_rows_become_json_objects() -> None:
    text = '\ufeffid,name\r\n1,"a, ""b"""\r\n2,"two\r\nlines"\r\n'
    found = read(text, RowFormat.CSV, Columns(key="id"))
    assert [(json.loads(body), key) for body, key, _ in found] == [
        ({"id": "1", "name": 'a, "b"'}, "1"),
        ({"id": "2", "name": "two\r\nlines"}, "2"),
    ]


@pytest.mark.parametrize(
    ("row_format", "text", "columns", "place", "words"),
    [
        (RowFormat.NDJSON, '{"a":1}\n{"a" 2}\n', Columns(), "in:2:6", "delimiter"),
        (RowFormat.NDJSON, '\n  {"a":}\n', Columns(), "in:2:8", "invalid JSON"),
        (
            RowFormat.NDJSON,
            '{"a":1}\n{"b":1}\n',
            Columns(key="a"),
            "in:2",
            "no field 'a'; it has b",
        ),
        (RowFormat.NDJSON, "3\n", Columns(key="a"), "in:1", "not a JSON object"),
        (RowFormat.NDJSON, '{"a":""}\n', Columns(body="a"), "in:1", "0 bytes"),
        (
            RowFormat.NDJSON,
            b'{"a":"\xc3\xbc\xff"}\n',
            Columns(),
            "in:1:8",
            "0xff is not valid UTF-8",
        ),
        (RowFormat.CSV, "", Columns(), "in:1", "no header line"),
        (
            RowFormat.CSV,
            "a,b\n1,2\n",
            Columns(tag="c"),
            "in:1",
            "no column 'c'; the columns are a, b",
        ),
        (RowFormat.CSV, "a,a\n1,2\n", Columns(), "in:1", "two columns are named 'a'"),
        (RowFormat.CSV, "a,b\n1,2\n1\n", Columns(), "in:3:2", "column 'b' is missing"),
        (
            RowFormat.CSV,
            'a,b\n"x\ny",2\n1,2,3\n',
            Columns(),
            "in:4:3",
            "unquoted value contain a comma?",
        ),
        (RowFormat.CSV, 'a,b\n1,2\n1,"2', Columns(), "in:3", "invalid CSV"),
        (RowFormat.CSV, b"a,b\n1,2\n1,\xe4\n", Columns(), "in:3:3", "0xe4 is not valid UTF-8"),
        (RowFormat.NDJSON, DEEP, Columns(), "in:1", "nested too deeply"),
        (RowFormat.NDJSON, '{"a":"\\ud83d"}', Columns(key="a"), "in:1", "key=.*lone surrogate"),
        (RowFormat.NDJSON, '{"a":"\\ud83d"}', Columns(body="a"), "in:1", "body=.*lone surrogate"),
        (RowFormat.NDJSON, '{"a":"x||y"}', Columns(tag="a"), "in:1", "could never be selected"),
        (RowFormat.CSV, "a\n1\n" + "x" * (LINE_BYTES_MAX + 1), Columns(), "in:3", "quote missing"),
        (RowFormat.CSV, 'a\n"' + "x" * (4 * 1024 * 1024) + '"', Columns(), "in:2", "4194312 bytes"),
        (RowFormat.LINES, "ok\n" + "x" * (4 * 1024 * 1024 + 1), Columns(), "in:2", "4194305 bytes"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_column(
    row_format: RowFormat, text: str | bytes, columns: Columns, place: str, words: str
) -> None:
    error = bad_row(text, row_format, columns)
    assert error.location == place
    assert re.search(words, error.reason)
    assert str(error).startswith(f"{place}: ")


@given(st.binary(), st.sampled_from(RowFormat))
def test_any_bytes_are_messages_or_a_bad_row(data: bytes, row_format: RowFormat) -> None:
    try:
        bodies = [body for body, _, _ in read(data, row_format)]
    except BadRow as error:
        bodies = [error.location.removeprefix("in:").encode()]
    assert all(bodies)
