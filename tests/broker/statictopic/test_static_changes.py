"""Changes of static topics: which mappings a broker accepts, and in which order it acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_broker.consumer.long_polling import HeldRequest
from headrace_broker.statictopic.undecided import UndecidedQueues
from headrace_broker.store.files.config_file import unsealed
from headrace_protocol import fastjson
from headrace_protocol.admin_headers import (
    CreateStaticTopicHeader,
    CreateTopicHeader,
    DeleteTopicHeader,
    GetAllTopicConfigHeader,
    GetConsumeStatsHeader,
    GetTopicConfigHeader,
    GetTopicStatsHeader,
    TopicConfigResponseHeader,
)
from headrace_protocol.codes import RequestCode, ResponseCode
from headrace_protocol.statictopic.mapping import (
    Chain,
    MappingInfo,
    MappingItem,
    TopicMapping,
    decode_detail,
    encode_detail,
)
from headrace_protocol.waiting import at_once
from tests.support.broker import Answer, BrokerUnderTest
from tests.support.channel import MemoryChannel
from tests.support.noted_files import NotedFiles
from tests.support.paused_clients import quota
from tests.support.rights import client_of

EPOCH = 1_700_000_000_000


@pytest.fixture
def broker(tmp_path: Path) -> BrokerUnderTest:
    broker = BrokerUnderTest(tmp_path)
    broker.clock.ms = EPOCH
    return broker


def item(gen: int = 0, queue_id: int = 0, logic: int = 0, **fields: Any) -> MappingItem:
    named = {"bname": "broker-a", **fields}
    return MappingItem(gen=gen, queue_id=queue_id, logic_offset=logic, **named)


def led_here(queues: int = 2, epoch: int = EPOCH, topic: str = "T") -> TopicMapping:
    """A new topic whose queues this broker leads, physical queue = logic queue."""
    hosted: dict[int, Chain] = {queue: (item(queue_id=queue),) for queue in range(queues)}
    return TopicMapping(
        topic=topic, bname="broker-a", epoch=epoch, total_queues=queues, hosted=hosted
    )


def moved(
    queue: int, to: MappingItem, old: TopicMapping, epoch: int = EPOCH + 1000
) -> TopicMapping:
    """The mapping with one more item for a queue."""
    chain = (*old.hosted[queue], to)
    return msgspec.structs.replace(old, epoch=epoch, hosted={**old.hosted, queue: chain})


def change(
    broker: BrokerUnderTest, mapping: TopicMapping, queues: int = 2, **fields: Any
) -> Answer:
    return broker.ask(
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
        header(mapping.topic, queues, **fields),
        encode_detail(mapping),
    )


def header(topic: str, queues: int, **fields: Any) -> CreateStaticTopicHeader:
    return CreateStaticTopicHeader(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=fields.pop("write_queue_nums", queues),
        perm=6,
        topic_filter_type="SINGLE_TAG",
        **fields,
    )


def stored(broker: BrokerUnderTest, topic: str = "T") -> TopicMapping:
    found = broker.mappings.get(topic)
    assert found is not None
    return found


def assert_refused(answer: Answer, *texts: str) -> None:
    assert answer.code == ResponseCode.INVALID_PARAMETER, answer.remark
    for text in texts:
        assert text in answer.remark


def test_a_topic_is_created(broker: BrokerUnderTest, tmp_path: Path) -> None:
    assert change(broker, led_here()).code == ResponseCode.SUCCESS
    topic = broker.topics.expect("T")
    assert (topic.read_queue_nums, topic.write_queue_nums) == (2, 2)
    assert [broker.mappings.leads("T", queue) for queue in range(3)] == [0, 1, None]
    config = tmp_path / "store" / "config"
    assert b'"T":{' in unsealed((config / "topicQueueMapping.json").read_bytes())
    assert unsealed((config / "staticTopic.json").read_bytes()) == (b'{"T":"static-%x"}' % EPOCH)


@pytest.mark.parametrize("exists", [False, True])
def test_a_topic_of_batches_is_refused(broker: BrokerUnderTest, exists: bool) -> None:
    if exists:
        broker.create_topic("T", attributes={"queue.type": "BatchCQ"})
    answer = change(broker, led_here(), attributes="" if exists else "+queue.type=BatchCQ")
    assert_refused(answer, "queue.type=BatchCQ", "use another topic")


def test_a_change_without_new_physical_queues_writes_the_mapping_alone(tmp_path: Path) -> None:
    saved: list[str] = []
    files = NotedFiles(lambda path, _: saved.append(path.name))
    broker = BrokerUnderTest(tmp_path, files=files)
    broker.clock.ms = EPOCH
    change(broker, led_here())
    saved.clear()
    version = broker.topics.data_version
    assert change(broker, led_here(epoch=EPOCH + 1000)).code == ResponseCode.SUCCESS
    assert saved == ["topicQueueMapping.json"]
    assert broker.topics.data_version != version


def test_the_leader_item_notes_when_it_began(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    assert [chain[-1].time_of_start for chain in stored(broker).hosted.values()] == [EPOCH, EPOCH]
    broker.clock.ms += 5000
    assert change(broker, led_here()).code == ResponseCode.SUCCESS
    assert stored(broker).hosted[0][0].time_of_start == EPOCH


def test_get_topic_config_has_the_mapping_if_asked(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    answer = broker.ask(RequestCode.GET_TOPIC_CONFIG, GetTopicConfigHeader(topic="T", logical=True))
    fields = fastjson.loads(answer.body)
    detail = decode_detail(fastjson.dumps(fields["mappingDetail"]))
    assert detail == stored(broker)
    assert list(fields) == sorted(fields)
    assert fields["readQueueNums"] == 2
    for logical in (None, False):
        plain = GetTopicConfigHeader(topic="T", logical=logical)
        body = broker.ask(RequestCode.GET_TOPIC_CONFIG, plain).body
        assert b"mappingDetail" not in body
    broker.create_topic("PLAIN")
    plain = GetTopicConfigHeader(topic="PLAIN", logical=True)
    assert b"mappingDetail" not in broker.ask(RequestCode.GET_TOPIC_CONFIG, plain).body


def test_all_topic_configs_have_the_mappings_with_quoted_keys(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    answer = broker.ask(RequestCode.GET_ALL_TOPIC_CONFIG, GetAllTopicConfigHeader())
    fields = msgspec.json.decode(answer.body)
    assert fields["topicQueueMappingDetailMap"]["T"]["hostedQueues"]["1"][0]["queueId"] == 1
    assert fields["mappingDataVersion"]["counter"] == 1


def test_a_static_topic_has_the_same_incarnation_everywhere(
    broker: BrokerUnderTest, tmp_path: Path
) -> None:
    change(broker, led_here())
    other = BrokerUnderTest(tmp_path / "other")
    other.clock.ms = EPOCH
    empty = msgspec.structs.replace(led_here(), hosted={})
    change(other, empty, queues=0)
    ids = {incarnation(each) for each in (broker, other)}
    assert len(ids) == 1
    change(broker, led_here(3, EPOCH + 9000), 3)
    assert {incarnation(broker)} == ids


def incarnation(broker: BrokerUnderTest) -> str | None:
    answer = broker.ask(RequestCode.GET_TOPIC_CONFIG, GetTopicConfigHeader(topic="T"))
    return answer.command.header(TopicConfigResponseHeader).incarnation


def test_it_is_all_there_after_a_restart(broker: BrokerUnderTest, tmp_path: Path) -> None:
    change(broker, led_here())
    name = incarnation(broker)
    broker.close()
    (tmp_path / "store/config/topics.json").unlink()  # the crash was before it was written
    (tmp_path / "store/config/topicIncarnation.json").unlink()
    again = BrokerUnderTest(tmp_path)
    topic = again.topics.expect("T")
    assert (topic.read_queue_nums, topic.write_queue_nums) == (2, 2)
    assert incarnation(again) == name


def test_a_queue_that_moves_away_is_closed(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    broker.store_message("T", 0)
    broker.clock.ms = EPOCH + 7000
    away = moved(0, item(1, 5, -1, bname="broker-b"), led_here())
    assert change(broker, away).code == ResponseCode.SUCCESS
    assert broker.mappings.leads("T", 0) is None
    assert broker.mappings.leads("T", 1) == 1
    closed, leader = stored(broker).hosted[0]
    assert (closed.time_of_start, closed.time_of_end) == (EPOCH, EPOCH + 7000)
    assert (closed.end_offset, leader.logic_offset) == (-1, -1)
    flushed = broker.store.commit_log.flushed_offset
    assert flushed == broker.store.commit_log.max_offset


@pytest.mark.parametrize(("logic", "end"), [(10_000, 1), (1, -1)])
def test_an_end_is_written_only_before_a_jump(
    broker: BrokerUnderTest, logic: int, end: int
) -> None:
    change(broker, led_here())
    broker.store_message("T", 0)
    away = moved(0, item(1, 5, -1, bname="broker-b"), led_here())
    change(broker, away)
    decided = moved(0, item(1, 5, logic, bname="broker-b"), led_here())
    assert change(broker, decided).code == ResponseCode.SUCCESS
    assert [each.end_offset for each in stored(broker).hosted[0]] == [end, -1]
    # A tool that never sets them leaves them as they are.
    assert change(broker, decided).code == ResponseCode.SUCCESS
    assert stored(broker).hosted[0][0].end_offset == end


def registered(broker: BrokerUnderTest) -> dict[str, int]:
    """The queues that nameservers know this broker to lead."""
    infos = at_once(broker.mappings.infos())
    return msgspec.json.decode(b"".join(infos.parts))["T"]["currIdMap"]


def test_a_closed_queue_stays_registered_until_its_leader_is_decided(
    broker: BrokerUnderTest,
) -> None:
    change(broker, led_here())
    away = moved(0, item(1, 5, -1, bname="broker-b"), led_here())
    change(broker, away)
    assert registered(broker) == {"0": 0, "1": 1}
    change(broker, moved(0, item(1, 5, 10_000, bname="broker-b"), led_here()))
    assert registered(broker) == {"1": 1}


def test_a_broker_does_not_pass_requests_to_itself(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    away = moved(0, item(1, 5, -1, bname="broker-b"), led_here())
    change(broker, away)
    leaders = broker.traffic.forwarding.leaders
    info = msgspec.json.decode(
        b"".join(at_once(broker.mappings.infos()).parts),
        type=dict[str, MappingInfo],
    )["T"]
    assert info.curr_id_map == {0: 0, 1: 1}
    leaders.note_route("T", [info], {})
    assert leaders.leader_of("T", 0) == "broker-b"


def test_a_closed_queue_does_not_stay_registered_for_long(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    change(broker, moved(0, item(1, 5, -1, bname="broker-b"), led_here()))
    before = broker.topics.data_version.counter
    broker.clock.ms += 2999
    at_once(broker.part(UndecidedQueues).look())
    assert registered(broker) == {"0": 0, "1": 1}
    broker.clock.ms += 1
    at_once(broker.part(UndecidedQueues).look())
    assert registered(broker) == {"1": 1}
    assert broker.topics.data_version.counter == before + 1


def test_a_queue_that_moves_here_is_written_at_once(broker: BrokerUnderTest) -> None:
    theirs = (item(0, 3, 0, bname="broker-b"), item(1, 0, -1))
    mapping = msgspec.structs.replace(led_here(), hosted={1: theirs})
    assert change(broker, mapping, 1).code == ResponseCode.SUCCESS
    assert broker.mappings.leads("T", 1) == 0


def test_a_held_pull_of_a_closed_queue_is_answered(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    queue = broker.store.queue("T", 0)
    answered: list[bool] = []
    hold(broker, queue, answered)
    change(broker, moved(1, item(1, 5, -1, bname="broker-b"), led_here()))
    assert answered == []
    away = moved(0, item(1, 6, -1, bname="broker-b"), stored(broker), EPOCH + 2000)
    change(broker, away)
    assert answered == [False]


def hold(broker: BrokerUnderTest, queue: Any, answered: list[bool]) -> None:
    class Held(HeldRequest):
        def try_answer(self, *, may_wait: bool) -> bool:
            if not may_wait:
                answered.append(may_wait)
            return not may_wait

    class FakeRequest:
        channel = MemoryChannel()

    held = Held(FakeRequest(), 0, 1)  # type: ignore[arg-type]
    queue.waiting = {held: None}
    held.queues = (queue,)


# -- refused ---------------------------------------------------------------------------------------


def test_a_mapping_of_another_broker(broker: BrokerUnderTest) -> None:
    theirs = msgspec.structs.replace(led_here(), bname="broker-b")
    assert_refused(change(broker, theirs), "topic T", "bname broker-b is not this broker")
    assert not broker.mappings.is_static("T")
    assert broker.mapping_changes.refused_count == 1


async def test_a_topic_beyond_its_makers_quota(broker: BrokerUnderTest) -> None:
    ann = client_of("ann")

    def make(topic: str) -> int:
        asked = header(topic, 2)
        code, body = (
            RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC,
            encode_detail(led_here(topic=topic)),
        )
        return broker.ask(code, asked, body, ann).code

    assert make("T") == ResponseCode.SUCCESS
    limited = quota("user", "ann", topics=2)
    assert broker.ask(RequestCode.SET_QUOTA, body=limited).code == ResponseCode.SUCCESS
    assert make("U") == ResponseCode.SUCCESS
    assert make("V") == ResponseCode.NO_PERMISSION
    assert not broker.mappings.is_static("V")
    assert make("U") == ResponseCode.SUCCESS  # again


def test_a_mapping_of_another_topic(broker: BrokerUnderTest) -> None:
    answer = broker.ask(
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, header("OTHER", 2), encode_detail(led_here())
    )
    assert_refused(answer, "T", "OTHER")


@pytest.mark.parametrize(
    ("epoch", "text"), [(EPOCH - 1, "older"), (EPOCH + 48 * 3_600_000, "clock")]
)
def test_an_epoch_that_falls_or_is_far_ahead(
    broker: BrokerUnderTest, epoch: int, text: str
) -> None:
    change(broker, led_here())
    assert_refused(change(broker, led_here(epoch=epoch)), "topic T", "epoch", text)


def test_another_scope(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    other = msgspec.structs.replace(led_here(epoch=EPOCH + 1), scope="__other__")
    assert_refused(change(broker, other), "scope")


def test_the_loser_of_two_tools_changes_nothing(broker: BrokerUnderTest) -> None:
    assert change(broker, led_here(), read_epoch=0).code == ResponseCode.SUCCESS
    away = moved(0, item(1, 5, -1, bname="broker-b"), led_here())
    assert change(broker, away, read_epoch=EPOCH).code == ResponseCode.SUCCESS
    before = stored(broker)
    # Of two tools with one plan, the second must notice the first.
    assert_refused(change(broker, away, read_epoch=EPOCH), "another tool")
    loser = moved(1, item(1, 6, -1, bname="broker-b"), led_here(), EPOCH + 3000)
    assert_refused(change(broker, loser, read_epoch=EPOCH), "another tool")
    assert stored(broker) == before


def test_a_queue_that_comes_back_after_its_items_were_cleaned_up(broker: BrokerUnderTest) -> None:
    """The chain of the others still has the item that clean-up dropped here."""
    change(broker, led_here())
    away = moved(0, item(1, 5, -1, bname="broker-b"), led_here())
    assert change(broker, away).code == ResponseCode.SUCCESS
    mappings = broker.mappings
    mappings.put(msgspec.structs.replace(stored(broker), hosted={1: led_here().hosted[1]}))
    chain = (*led_here().hosted[0], item(1, 0, 5, bname="broker-b"), item(2, 2, -1))
    back = msgspec.structs.replace(away, epoch=away.epoch + 1000, hosted={0: chain})
    answer = change(broker, back, 3)
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    assert mappings.leads("T", 0) == 2


def test_a_physical_queue_that_was_used(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    away = moved(0, item(1, 5, 10_000, bname="broker-b"), led_here())
    change(broker, away)
    # Comes back, but to the queue that it had.
    back = msgspec.structs.replace(
        away,
        epoch=EPOCH + 5000,
        hosted={0: (item(1, 5, 10_000, bname="broker-b"), item(2, 0, 20_000)), 1: away.hosted[1]},
    )
    answer = change(broker, back)
    assert_refused(answer, "queue 0, gen 2", "queueId")


def test_a_physical_queue_beyond_those_of_the_topic(broker: BrokerUnderTest) -> None:
    assert_refused(change(broker, led_here(), queues=1), "queue 1", "queueId 1 is beyond")
    assert not broker.mappings.is_static("T")


def test_offsets_of_a_topic_that_was_lost_are_none_of_a_new_one(broker: BrokerUnderTest) -> None:
    for queue_id in range(2):
        broker.offsets.commit("g", "T", queue_id, 7)
    assert change(broker, led_here()).code == ResponseCode.SUCCESS
    assert [broker.offsets.query("g", "T", queue_id) for queue_id in range(2)] == [None, None]


def test_fewer_queues(broker: BrokerUnderTest) -> None:
    change(broker, led_here(3), 3)
    hosted = {0: led_here().hosted[0]}
    fewer = msgspec.structs.replace(led_here(3, EPOCH + 1), hosted=hosted)
    assert_refused(change(broker, fewer, 1), "readQueueNums 1 is less than the 3")


def test_an_item_with_messages_stays(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    broker.store_message("T", 0)
    gone = msgspec.structs.replace(
        led_here(epoch=EPOCH + 1000),
        hosted={0: (item(1, 5, 10_000, bname="broker-b"),), 1: led_here().hosted[1]},
    )
    assert_refused(change(broker, gone), "topic T, queue 0, gen 0", "1 messages")


def test_an_empty_item_is_dropped(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    gone = msgspec.structs.replace(
        led_here(epoch=EPOCH + 1000),
        hosted={0: (item(1, 5, 0, bname="broker-b"),), 1: led_here().hosted[1]},
    )
    assert change(broker, gone).code == ResponseCode.SUCCESS
    assert broker.mappings.leads("T", 0) is None


def test_a_plain_topic_with_messages(broker: BrokerUnderTest) -> None:
    broker.create_topic("T", 2)
    assert change(broker, led_here()).code == ResponseCode.SUCCESS  # left by a peer's failed 513
    broker.create_topic("U", 2)
    broker.store_message("U", 1)
    assert_refused(change(broker, led_here(topic="U")), "topic U exists and is not static")


def test_attributes(broker: BrokerUnderTest) -> None:
    """Each step of a tool may name them. A broker without messages takes them later, too."""
    compacted = {"cleanup.policy": "COMPACTION", "key.queue": "java"}
    text = ",".join(f"+{key}={value}" for key, value in compacted.items())
    change(broker, led_here())
    assert broker.topics.expect("T").attributes == {}
    for step in range(2):
        answer = change(broker, led_here(epoch=EPOCH + 1000 * (step + 1)), attributes=text)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        assert broker.topics.expect("T").attributes == compacted
    broker.store_message("T", 0, KEYS="k")
    later = led_here(epoch=EPOCH + 5000)
    assert change(broker, later, attributes=text).code == ResponseCode.SUCCESS
    latest = led_here(epoch=EPOCH + 6000)
    answer = change(broker, latest, attributes="+cleanup.policy=DELETE")
    assert_refused(answer, "'cleanup.policy' can't change")
    assert broker.topics.expect("T").attributes == compacted


def test_more_queues_of_a_compacted_topic(broker: BrokerUnderTest) -> None:
    change(broker, led_here(), attributes="+cleanup.policy=COMPACTION")
    more = led_here(3, EPOCH + 1000)
    assert_refused(
        change(broker, more, 3), "totalQueues of a compacted topic", "--queues 3 --force"
    )
    assert change(broker, more, 3, read_epoch=EPOCH).code == ResponseCode.SUCCESS


def test_a_system_topic(broker: BrokerUnderTest) -> None:
    answer = change(broker, led_here(topic="SCHEDULE_TOPIC_XXXX"))
    assert_refused(answer, "system topic")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"topic":1}', b'{"topic":"T"}', b"\xff" * 99])
def test_bodies_that_are_no_mapping(broker: BrokerUnderTest, body: bytes) -> None:
    code = RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC
    assert broker.ask(code, header("T", 2), body).code == ResponseCode.INVALID_PARAMETER
    assert not broker.mappings.is_static("T")


def test_a_large_mapping_is_checked_in_a_thread(broker: BrokerUnderTest) -> None:
    chain = tuple(item(gen, gen + 1, gen * 10_000, bname="broker-b") for gen in range(1000))
    large = msgspec.structs.replace(led_here(), hosted={0: chain})
    assert len(encode_detail(large)) > 64 * 1024
    assert change(broker, large, 0).code == ResponseCode.SUCCESS
    bad = msgspec.structs.replace(large, hosted={0: (*chain, chain[0])})
    assert_refused(change(broker, bad, 0), "gen")


# -- other requests --------------------------------------------------------------------------------


def plain(queues: int, **fields: Any) -> CreateTopicHeader:
    named: dict[str, Any] = {"perm": 6, "topic_filter_type": "SINGLE_TAG", **fields}
    return CreateTopicHeader(topic="T", read_queue_nums=queues, write_queue_nums=queues, **named)


def test_update_topic_changes_the_perm_but_no_queues(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    code = RequestCode.UPDATE_AND_CREATE_TOPIC
    for queues in (1, 3):
        answer = broker.ask(code, plain(queues))
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "topic[T] is static" in answer.remark
    assert broker.ask(code, plain(2, perm=4)).code == ResponseCode.SUCCESS
    assert broker.topics.expect("T").perm == 4
    assert broker.mappings.leads("T", 1) == 1


def test_statistics_name_physical_queues(broker: BrokerUnderTest) -> None:
    change(broker, led_here())
    for _ in range(3):
        broker.store_message("T", 0)
    stats = broker.ask(RequestCode.GET_TOPIC_STATS_INFO, GetTopicStatsHeader(topic="T"))
    table = fastjson.loads(stats.body)["offsetTable"]
    assert {key["queueId"]: row["maxOffset"] for key, row in table.items()} == {0: 3, 1: 0}
    assert {key["brokerName"] for key in table} == {"broker-a"}
    broker.join("g", "member", "T")
    broker.offsets.commit("g", "T", 0, 2)
    header = GetConsumeStatsHeader(consumer_group="g", topic="T")
    progress = fastjson.loads(broker.ask(RequestCode.GET_CONSUME_STATS, header).body)
    offsets = {
        key["queueId"]: row["consumerOffset"] for key, row in progress["offsetTable"].items()
    }
    assert offsets == {0: 2, 1: -1}


def test_a_deleted_topic_leaves_nothing(broker: BrokerUnderTest, tmp_path: Path) -> None:
    change(broker, led_here())
    broker.store_message("T", 0)
    answer = broker.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicHeader(topic="T"))
    assert answer.code == ResponseCode.SUCCESS
    assert broker.topics.get("T") is None
    assert not broker.mappings.is_static("T")
    config = tmp_path / "store" / "config"
    assert unsealed((config / "staticTopic.json").read_bytes()) == b"{}"
    assert b'"T"' not in unsealed((config / "topicQueueMapping.json").read_bytes())
    broker.create_topic("T")
    assert change(broker, led_here()).code == ResponseCode.SUCCESS


def test_a_topic_whose_mapping_is_lost_can_be_deleted_or_restored(
    broker: BrokerUnderTest, tmp_path: Path
) -> None:
    change(broker, led_here())
    broker.store_message("T", 0)
    broker.close()
    (tmp_path / "store/config/topicQueueMapping.json").unlink()
    again = BrokerUnderTest(tmp_path)
    again.clock.ms = EPOCH
    assert change(again, led_here()).code == ResponseCode.SUCCESS
    assert again.mappings.leads("T", 0) == 0
    again.close()
    for path in (tmp_path / "store/config").glob("topicQueueMapping.json*"):
        path.unlink()
    last = BrokerUnderTest(tmp_path)
    code = RequestCode.DELETE_TOPIC_IN_BROKER
    assert last.ask(code, DeleteTopicHeader(topic="T")).code == ResponseCode.SUCCESS
    assert not last.mappings.is_static("T")
