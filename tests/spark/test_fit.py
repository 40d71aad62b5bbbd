"""Times without a zone, in the zone of the session."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace

import pytest
from pyspark import TaskContext

from headrace.spark.body import fit
from headrace.spark.errors import SparkConnectorError
from tests.spark.test_bodies import decoded

NOON = dt.datetime(2026, 7, 1, 12)  # noqa: DTZ001 - the zone is the session's


def set_zone(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    context = SimpleNamespace(getLocalProperty={"spark.sql.session.timeZone": name}.get)
    monkeypatch.setattr(TaskContext, "get", lambda: context)


# Names and offsets as Spark 4.3 has them.
@pytest.mark.parametrize(
    ("name", "offset_s"),
    [
        ("UTC", 0), ("Z", 0), ("GMT0", 0), ("UTC+3", 10_800), ("GMT-8", -28_800), ("+2", 7200),
        ("+02:30:15", 9015), ("+05:30", 19_800), ("EST", -18_000),
        ("America/Los_Angeles", -25_200), ("Asia/Tokyo", 32_400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", ["{}", "array<{}>", "struct<x:{}>", "map<string,{}>"])
def test_a_time_without_a_zone_is_in_that_of_the_session(
    monkeypatch: pytest.MonkeyPatch, name: str, offset_s: int, shape: str
) -> None:
    set_zone(monkeypatch, name)
    value = {"array<{}>": '["T"]', "struct<x:{}>": '{"x":"T"}', "map<string,{}>": '{"x":"T"}'}
    body = f'{{"a": {value.get(shape, chr(34) + "T" + chr(34))}}}'.replace("T", NOON.isoformat())
    rows, corrupt = decoded(f"a {shape.format('timestamp')}", [body.encode()])
    found = rows[0]["a"]
    if isinstance(found, dict):
        found = found["x"]
    elif isinstance(found, list):
        found = found[0][1] if isinstance(found[0], tuple) else found[0]
    assert corrupt == [None]
    assert found == NOON.replace(tzinfo=dt.UTC) - dt.timedelta(seconds=offset_s)


def test_a_zone_that_only_java_has(monkeypatch: pytest.MonkeyPatch) -> None:
    set_zone(monkeypatch, "PST")
    assert decoded("a timestamp", [b'{"a": "2026-01-31T12:00:00Z"}'])[1] == [None]
    with pytest.raises(SparkConnectorError, match=r"timeZone=PST .* America/Los_Angeles"):
        decoded("a timestamp", [b'{"a": "2026-01-31T12:00:00"}'])


def test_without_a_setting_the_zone_is_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    set_zone(monkeypatch, None)
    assert fit.session_zone() is None
    rows, _ = decoded("a timestamp", [b'{"a": "2026-07-01T12:00:00"}'])
    assert rows[0]["a"] == NOON.astimezone()
