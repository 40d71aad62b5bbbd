"""Topics that have had the same name are told apart."""

from __future__ import annotations

import json
from pathlib import Path

from headrace_broker.inner.delivery import REASON
from headrace_broker.store.files.config_file import ConfigFile
from headrace_broker.topics.incarnations import Incarnations
from headrace_broker.topics.table import TopicTable
from headrace_protocol.admin_headers import GetTopicConfigHeader, TopicConfigResponseHeader
from headrace_protocol.bodies import TopicConfig
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.message import TRANSACTION_COMMIT
from headrace_protocol.system_topics import UNDELIVERED_TOPIC
from tests.support.broker import BrokerUnderTest, broker_config
from tests.support.ledger import Ledger

NOW_MS = 1_700_000_000_000


def table(folder: Path) -> TopicTable:
    return TopicTable(broker_config(folder), ConfigFile(folder / "topics.json"), lambda: NOW_MS)


def ids(topics: TopicTable, *names: str) -> list[str | None]:
    return [topics.incarnations.of(name) for name in names]


def test_each_topic_has_an_id_that_stays(tmp_path: Path) -> None:
    topics = table(tmp_path)
    topics.put_all([TopicConfig(topic_name=name) for name in ("a", "b")])
    first = ids(topics, "a", "b")
    assert len(set(first)) == 2
    assert None not in first
    topics.put(TopicConfig(topic_name="a", perm=4))
    assert ids(topics, "a", "b") == first
    assert ids(table(tmp_path), "a", "b") == first
    assert ids(topics, "TBW102", "never") == [None, None]


def test_a_topic_that_is_made_anew_has_another_id(tmp_path: Path) -> None:
    topics = table(tmp_path)
    topics.put(TopicConfig(topic_name="a"))
    (first,) = ids(topics, "a")
    topics.delete("a")
    assert ids(topics, "a") == [None]
    topics.put(TopicConfig(topic_name="a"))
    assert ids(topics, "a") not in ([first], [None])
    assert ids(table(tmp_path), "a") == ids(topics, "a")


def test_only_the_topic_made_for_a_lost_one_takes_the_messages_before_it(tmp_path: Path) -> None:
    made = Incarnations(ConfigFile(tmp_path / "ids.json"), [], lambda: 70)
    made.recovered(lost=["a"])
    for created_at in (0, 70):
        made.created(["a"])
        assert made.created_at("a") == created_at
        made.deleted("a")


def test_topics_that_another_broker_has_made_get_ids_at_the_start(tmp_path: Path) -> None:
    topics = table(tmp_path)
    topics.put_all([TopicConfig(topic_name=name) for name in ("a", "b")])
    path = tmp_path / "topicIncarnation.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({"a": known["a"], "gone": "17"}))
    again = table(tmp_path)
    assert ids(again, "a", "gone") == [known["a"], None]
    assert ids(again, "b") not in ([known["b"]], [None])
    assert json.loads(path.read_text()).keys() == {"a", "b"}


def test_the_id_comes_with_the_topic(broker: BrokerUnderTest) -> None:
    broker.create_topic("t")
    answer = broker.ask(RequestCode.GET_TOPIC_CONFIG, GetTopicConfigHeader(topic="t"))
    told = answer.command.header(TopicConfigResponseHeader).incarnation
    assert told == broker.topics.incarnations.of("t")
    assert told is not None


async def test_a_topic_made_anew_does_not_get_what_waited_for_the_old_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.broker.create_topic("T")
    async with ledger.running():
        ledger.end(ledger.send(b"first"), TRANSACTION_COMMIT)
        half = ledger.send(b"old")
        ledger.broker.topics.delete("T")
        ledger.broker.create_topic("T")
        ledger.end(ledger.send(b"new"), TRANSACTION_COMMIT)
        assert ledger.end(half, TRANSACTION_COMMIT).code == ResponseCode.SUCCESS
    (message,) = ledger.stored(UNDELIVERED_TOPIC, 0)
    assert message.body == b"old"
    assert "deleted and made anew" in message.properties[REASON]
    assert ledger.bodies()[-1] == b"new"
