from __future__ import annotations

import pickle

import pytest

from headrace.spark.errors import (
    CheckpointMismatch,
    DataLoss,
    OptionError,
    SparkConnectorError,
    TopicDeleted,
    TopicRecreated,
)
from headrace.spark.options import SPLIT_BYTES, Limits, Point, read_options
from headrace_protocol.bodies import MessageQueue


def options(**given: str) -> dict[str, str]:
    return {"nameserver": "a:1;b:2", "topic": "t", **given}


def test_what_is_not_given_has_a_default() -> None:
    found = read_options(options())
    assert found.nameservers == ("a:1", "b:2")
    assert (found.topics.names, found.topics.patterns) == (("t",), ())
    assert (found.group, found.reader_group) == (None, "headrace_reader")
    assert (found.starting, found.ending) == (None, None)
    assert (found.tags, found.sql) == ("*", None)
    assert not found.limits
    assert (found.split_bytes, found.fail_on_data_loss) == (SPLIT_BYTES, True)
    assert (found.schema, found.encoding) == (None, None)


def test_names_are_known_in_any_case_as_spark_gives_them() -> None:
    found = read_options(options(maxrows="5", MAXBYTES="6", maxSeconds="7", failondataloss="False"))
    assert found.limits == Limits(5, 6, 7)
    assert not found.fail_on_data_loss


def test_the_environment_knows_the_nameserver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NAMESERVER", "c:3")
    assert read_options({"topic": "t"}).nameservers == ("c:3",)


def test_topics_are_names_and_patterns() -> None:
    topics = read_options(options(topic="a, b-*,c[12]")).topics
    assert tuple(topics) == (("a",), ("b-*", "c[12]"))
    assert [topics.match(name) for name in ("a", "b-x", "c2", "c3", "aa")] == [
        *(True, True, True),
        *(False, False),
    ]


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("earliest", Point("earliest")),
        ("LATEST", Point("latest")),
        ("1700000000123", Point("time", 1_700_000_000_123)),
        ("2023-11-14T22:13:20.123Z", Point("time", 1_700_000_000_123)),
        ("2023-11-14 23:13:20.123+01:00", Point("time", 1_700_000_000_123)),
        (
            '{"t": {"b-a": {"0": 7, "1": 0}}, "u": {"b-b": {"3": 1}}}',
            Point(
                "offsets",
                offsets={
                    MessageQueue("t", "b-a", 0): 7,
                    MessageQueue("t", "b-a", 1): 0,
                    MessageQueue("u", "b-b", 3): 1,
                },
            ),
        ),
    ],
)
def test_a_point_is_a_word_a_time_or_offsets(text: str, point: Point) -> None:
    found = read_options(options(starting=text, ending=text))
    assert found.starting == found.ending == point


@pytest.mark.parametrize(
    ("text", "tags", "sql"),
    [
        ("*", "*", None),
        ("paid", "paid", None),
        ("paid || sent", "paid || sent", None),
        ("price > 3 AND TAGS = 'x'", "*", "price > 3 AND TAGS = 'x'"),
        ("a IS NOT NULL", "*", "a IS NOT NULL"),
    ],
)
def test_a_filter_is_of_tags_or_sql(text: str, tags: str, sql: str | None) -> None:
    found = read_options(options(filter=text))
    assert (found.tags, found.sql) == (tags, sql)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topik": "x"}, "option topik='x': unknown.*did you mean topic?"),
        ({"startingOffsets": "x"}, "startingOffsets='x': belongs to the Kafka source.* starting"),
        ({"subscribe": "x"}, "subscribe='x': belongs to the Kafka source; here it is topic"),
        ({"subscribePattern": "x"}, "here it is topic, with "),
        ({"kafka.bootstrap.servers": "x"}, "here it is nameserver"),
        ({"kafka.security.protocol": "x"}, "protocol='x': belongs to the Kafka source$"),
        ({"maxOffsetsPerTrigger": "5"}, "here it is maxRows"),
        (
            {"path": "orders"},
            r"path='orders': load\(\), .* take no topic: use .option\(.topic., .ord",
        ),
        ({"owner": "root"}, "CREATE TABLE.*no options: use CREATE TEMPORARY VIEW"),
        ({"provider": "headrace"}, "CREATE TABLE.*no options: use CREATE TEMPORARY VIEW"),
        ({"zzz": "x"}, "unknown; valid options are caFile, certFile, .*topic, user$"),
        ({"topic": ""}, "option topic='': is empty"),
        ({"topic": "a b"}, "option topic='a b': 'a b' is not a valid topic name"),
        ({"nameserver": "here"}, "option nameserver='here'.*HOST:PORT"),
        ({"maxRows": "0"}, "option maxRows='0': expected a whole number"),
        ({"maxBytes": "1k"}, "option maxBytes='1k': expected a whole number"),
        ({"splitBytes": "-1"}, "option splitBytes='-1'"),
        ({"failOnDataLoss": "no"}, "option failOnDataLoss='no': expected true or false"),
        ({"starting": "first"}, "option starting='first': expected earliest, latest, a time"),
        ({"ending": "2026-01-01"}, r"has no time zone.* 2026-01-01T00:00:00Z\?"),
        ({"ending": str(2**63)}, "expected earliest, latest, a time"),
        ({"starting": "{1}"}, r"option starting=.\{1\}.: expected earliest"),
        ({"starting": '{"t": 1}'}, "expected earliest"),
        ({"starting": '{"t": {"b": {"0": -1}}}'}, "-1 is not a queue offset"),
        ({"starting": '{"t": {"b": {"x": 1}}}'}, "invalid literal"),
        ({"group": "a b"}, "option group='a b': 'a b' is not a valid group name"),
        (
            {"starting": '{"t": {"b": {"0": 8}}}', "ending": '{"t": {"b": {"0": 7}}}'},
            "option starting=.*8.*: lies after option ending=.*7",
        ),
        ({"starting": "latest", "ending": "earliest"}, "starting='latest': .* ending='earliest'"),
        ({"starting": "2000", "ending": "1999"}, "starting='2000': .* ending='1999'"),
        ({"starting": "latest", "ending": '{"t": {"b": {"0": 7}}}'}, "starting='latest': .*7"),
    ],
)
def test_wrong_options_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read_options(options(**given))


@pytest.mark.parametrize(
    ("starting", "ending"),
    [
        ("2000", "2000"),
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("latest", "2000"),
        ('{"t": {"b": {"0": 7}}}', '{"t": {"b": {"0": 7, "1": 3}}}'),
        ('{"t": {"b": {"0": 7}}}', "2000"),
    ],
)
def test_a_range_may_happen_to_be_empty(starting: str, ending: str) -> None:
    found = read_options(options(starting=starting, ending=ending))
    assert found.starting is not None
    assert found.ending is not None


def test_a_missing_topic_is_named() -> None:
    with pytest.raises(OptionError, match=r"is missing: .option\(.topic., .flights.\)$"):
        read_options({"nameserver": "127.0.0.1:9876"})
    with pytest.raises(OptionError, match=r"is missing: .*flights.*use CREATE TEMPORARY VIEW"):
        read_options({})


@pytest.mark.parametrize(
    "error",
    [
        OptionError("topik", "x", "unknown", "topic"),
        DataLoss("t", "b", 3, 17, "the oldest is 20"),
        TopicRecreated("t", "b", "because"),
        TopicDeleted("t", "b"),
        CheckpointMismatch("another"),
    ],
)
def test_errors_travel_between_processes(error: SparkConnectorError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("name", ["accessKey", "SECRETKEY", "password"])
def test_credentials_are_refused_and_not_shown(name: str) -> None:
    with pytest.raises(OptionError, match="use user and passwordFile") as caught:
        read_options(options(**{name: "s3cret"}))
    assert "s3cret" not in str(caught.value)
