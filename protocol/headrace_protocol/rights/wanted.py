"""The rights that each request needs: one row for each code that a daemon serves.

A code without a row is for Super users only. Names that a request leaves out, and names that it
merely claims, are judged by its function on what it finds; so are the parts of lists and of
heartbeats. Source: docs/security.md "What is checked"; tests/protocol/test_wanted.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_protocol import admin_headers as admin
from headrace_protocol import headers as h
from headrace_protocol import nameserver_headers as ns
from headrace_protocol import tier_headers as tier
from headrace_protocol.bodies import (
    CheckClientRequestBody,
    CreateTopicListRequestBody,
    LockBatchRequestBody,
    QueryAssignmentRequestBody,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
)
from headrace_protocol.bounds import check_marks
from headrace_protocol.codes import RequestCode as C
from headrace_protocol.codes import ResponseCode, code_name
from headrace_protocol.errors import RequestError
from headrace_protocol.pop import headers as pop
from headrace_protocol.pop.batch_ack import BatchAckBody
from headrace_protocol.pop.handle import TopicKind
from headrace_protocol.rights.rules import Action, Kind
from headrace_protocol.serving import check_body
from headrace_protocol.system_topics import DEFAULT_TOPIC, GROUP_PREFIXES, is_own_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace_protocol.serving import Request

Actions = frozenset[Action]

NONE: Final[Actions] = frozenset()
PUB: Final = frozenset({Action.PUB})
SUB: Final = frozenset({Action.SUB})
CREATE: Final = frozenset({Action.CREATE})
UPDATE: Final = frozenset({Action.UPDATE})
DELETE: Final = frozenset({Action.DELETE})
GET: Final = frozenset({Action.GET})
_CHANGES: Final = CREATE | UPDATE | DELETE

# The cluster of the daemon that is asked.
OWN_CLUSTER: Final = ""


class Wanted(NamedTuple):
    """A right that a request needs. actions: one of them is enough."""

    kind: Kind
    name: str
    actions: Actions


class Row(NamedTuple):
    """The rights that the requests of a code need.

    header, names: attributes of the header that name resources, and what is asked of each; those
    that a request leaves out are not asked.
    read: yields further rights, whose actions are ``actions``.
    actions: without ``read``, what is asked of the cluster if the header names nothing.
    is_for_anybody: whether nobody is even identified.
    """

    header: type[h.RequestHeader] | None = None
    names: Mapping[str, Actions] = {}
    actions: Actions = NONE
    read: Callable[[Request, Actions], Iterable[Wanted]] | None = None
    is_for_anybody: bool = False


def _header(header: type[h.RequestHeader], *, otherwise: Actions = NONE, **names: Actions) -> Row:
    return Row(header, names, otherwise)


def _cluster(actions: Actions) -> Row:
    return Row(actions=actions)


def _read(read: Callable[[Request, Actions], Iterable[Wanted]], actions: Actions) -> Row:
    return Row(actions=actions, read=read)


def wanted_of(kind: Kind, name: str, actions: Actions) -> Wanted:
    """The right to a resource."""
    return wanted_of_topic(name, actions) if kind is Kind.TOPIC else Wanted(kind, name, actions)


def wanted_of_topic(topic: str, actions: Actions) -> Wanted:
    """The right to a topic: that to the group of a retry or dead-letter topic.

    The broker's own topics hold messages of all topics, so that they count as the cluster.
    """
    if is_own_topic(topic):
        is_read = actions.isdisjoint(_CHANGES | PUB)
        return Wanted(Kind.CLUSTER, OWN_CLUSTER, GET if is_read else UPDATE)
    for prefix in GROUP_PREFIXES:
        if topic.startswith(prefix):
            group_actions = actions - PUB | SUB if Action.PUB in actions else actions
            return Wanted(Kind.GROUP, topic.removeprefix(prefix), group_actions)
    return Wanted(Kind.TOPIC, topic, actions)


# -- requests whose names are not simply in the header ---------------------------------------------


def _route(request: Request, actions: Actions) -> Iterator[Wanted]:
    # The template of topics that are made by sending has no messages; every producer asks for it.
    topic = request.header(ns.GetRouteInfoHeader).topic
    if topic != DEFAULT_TOPIC:
        yield wanted_of_topic(topic, actions)


def _locked(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    body = LockBatchRequestBody.decode(request.body)
    for topic in {queue.topic for queue in body.mq_set}:
        yield wanted_of_topic(topic, actions)
    yield Wanted(Kind.GROUP, body.consumer_group, actions)


def _subscribed(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    body = CheckClientRequestBody.decode(request.body)
    yield wanted_of_topic(body.subscription_data.topic, actions)
    yield Wanted(Kind.GROUP, body.group, actions)


def _created_topics(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    check_marks("topics", request.body, b"{", 2)  # one of the two for the attributes
    for topic in CreateTopicListRequestBody.decode(request.body).topic_config_list:
        yield wanted_of_topic(topic.topic_name, actions)


def _created_group(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    yield Wanted(Kind.GROUP, SubscriptionGroupConfig.decode(request.body).group_name, actions)


def _settled(request: Request, actions: Actions) -> Iterator[Wanted]:
    # The topic that holds the message: the retry topics of a POP name their topic, too.
    header = request.header(pop.AckMessageHeader)
    topic, group = header.topic, header.consumer_group
    for kind in (TopicKind.RETRY_V1, TopicKind.RETRY_V2):
        topic = topic.removeprefix(kind.topic("", group))
    yield wanted_of_topic(topic, actions)
    yield Wanted(Kind.GROUP, group, actions)


def _acked(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    body = BatchAckBody.decode(request.body)
    body.check()
    for topic in {ack.topic for ack in body.acks}:
        yield wanted_of_topic(topic, actions)
    for group in {ack.consumer_group for ack in body.acks}:
        yield Wanted(Kind.GROUP, group, actions)


def _assigned(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    body = QueryAssignmentRequestBody.decode(request.body)
    yield wanted_of_topic(body.topic, actions)
    yield Wanted(Kind.GROUP, body.consumer_group, actions)


def _request_mode(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    body = SetMessageRequestModeRequestBody.decode(request.body)
    yield wanted_of_topic(body.topic, actions)
    yield Wanted(Kind.GROUP, body.consumer_group, actions)


def _created_groups(request: Request, actions: Actions) -> Iterator[Wanted]:
    check_body(request)
    for group in SubscriptionGroupList.decode(request.body).group_config_list:
        yield Wanted(Kind.GROUP, group.group_name, actions)


# -- the table -------------------------------------------------------------------------------------

# For everybody, known or not: it is how a client becomes known.
ANYBODY: Final = Row(is_for_anybody=True)
# For every user and for anonymous, if they are admitted at all. Its function leaves out of a list
# what the subject may not see, and judges what else the request reaches.
ADMITTED: Final = Row()

TABLE: Final[Mapping[int, Row]] = {
    # -- messages
    C.SEND_MESSAGE: _header(h.SendMessageHeader, topic=PUB),
    C.SEND_MESSAGE_V2: _header(h.SendMessageHeaderV2, topic=PUB),
    C.SEND_BATCH_MESSAGE: _header(h.SendMessageHeaderV2, topic=PUB),
    C.SEND_REPLY_MESSAGE: _header(h.SendMessageHeader, topic=PUB),
    C.SEND_REPLY_MESSAGE_V2: _header(h.SendMessageHeaderV2, topic=PUB),
    C.BULK_SEND: _header(h.BulkSendHeader, topic=PUB),
    C.RECALL_MESSAGE: _header(h.RecallMessageHeader, topic=PUB),
    # The half message tells its topic.
    C.END_TRANSACTION: ADMITTED,
    C.PULL_MESSAGE: _header(h.PullMessageHeader, topic=SUB, consumer_group=SUB),
    C.LITE_PULL_MESSAGE: _header(h.PullMessageHeader, topic=SUB, consumer_group=SUB),
    C.BULK_PULL: _header(h.BulkPullHeader, topic=SUB, consumer_group=SUB),
    C.POP_MESSAGE: _header(pop.PopMessageHeader, topic=SUB, consumer_group=SUB),
    C.PEEK_MESSAGE: _header(pop.PeekMessageHeader, topic=SUB, consumer_group=SUB),
    C.ACK_MESSAGE: _read(_settled, SUB),
    C.BATCH_ACK_MESSAGE: _read(_acked, SUB),
    C.CHANGE_MESSAGE_INVISIBLETIME: _read(_settled, SUB),
    C.NOTIFICATION: _header(pop.NotificationHeader, topic=SUB, consumer_group=SUB),
    C.POLLING_INFO: _header(pop.PollingInfoHeader, topic=GET, consumer_group=GET),
    # The message tells its topic.
    C.CONSUMER_SEND_MSG_BACK: _header(h.ConsumerSendMsgBackHeader, group=SUB),
    C.VIEW_MESSAGE_BY_ID: _header(h.ViewMessageHeader, topic=SUB | GET),
    C.QUERY_MESSAGE: _header(h.QueryMessageHeader, topic=SUB | GET),
    C.GET_BY_KEY: _header(h.GetByKeyHeader, topic=SUB | GET),
    # The first block of a query names its topic; the others come from its user alone.
    C.STAGE_SEND: _header(h.StageSendHeader, topic=PUB),
    C.STAGE_SEAL: ADMITTED,
    C.STAGE_STATE: ADMITTED,
    C.STAGE_DECIDE: ADMITTED,
    C.STAGE_COMMIT: ADMITTED,
    C.STAGE_ABORT: ADMITTED,
    C.STAGE_FORGET: ADMITTED,
    # -- clients
    # It takes the permitted groups and topics, and names the others.
    C.HEART_BEAT: ADMITTED,
    C.UNREGISTER_CLIENT: _header(h.UnregisterClientHeader, consumer_group=SUB),
    C.CHECK_CLIENT_CONFIG: _read(_subscribed, SUB),
    C.GET_CONSUMER_LIST_BY_GROUP: _header(h.ConsumerGroupHeader, consumer_group=SUB | GET),
    C.LOCK_BATCH_MQ: _read(_locked, SUB),
    C.UNLOCK_BATCH_MQ: _read(_locked, SUB),
    C.QUERY_ASSIGNMENT: _read(_assigned, SUB),
    C.SET_MESSAGE_REQUEST_MODE: _read(_request_mode, UPDATE),
    C.GET_ALL_MESSAGE_REQUEST_MODE: _cluster(GET),
    # -- offsets
    C.QUERY_CONSUMER_OFFSET: _header(
        h.QueryConsumerOffsetHeader, topic=SUB | GET, consumer_group=SUB | GET
    ),
    C.UPDATE_CONSUMER_OFFSET: _header(
        h.UpdateConsumerOffsetHeader, topic=SUB | UPDATE, consumer_group=SUB | UPDATE
    ),
    C.SEARCH_OFFSET_BY_TIMESTAMP: _header(h.SearchOffsetHeader, topic=SUB | GET),
    C.GET_MAX_OFFSET: _header(h.GetMaxOffsetHeader, topic=SUB | GET),
    C.GET_MIN_OFFSET: _header(h.GetMinOffsetHeader, topic=SUB | GET),
    C.GET_EARLIEST_MSG_STORETIME: _header(h.GetEarliestMsgStoretimeHeader, topic=SUB | GET),
    C.INVOKE_BROKER_TO_RESET_OFFSET: _header(admin.ResetOffsetHeader, topic=UPDATE, group=UPDATE),
    C.CLONE_GROUP_OFFSET: _header(
        admin.CloneGroupOffsetHeader, topic=UPDATE, dest_group=UPDATE, src_group=UPDATE | GET
    ),
    C.GET_ALL_CONSUMER_OFFSET: _cluster(GET),
    C.GET_ALL_DELAY_OFFSET: _cluster(GET),
    # -- topics
    C.UPDATE_AND_CREATE_TOPIC: _header(admin.CreateTopicHeader, topic=CREATE),
    C.UPDATE_AND_CREATE_TOPIC_LIST: _read(_created_topics, CREATE),
    C.UPDATE_AND_CREATE_STATIC_TOPIC: _header(admin.CreateStaticTopicHeader, topic=CREATE),
    C.DELETE_TOPIC_IN_BROKER: _header(admin.DeleteTopicHeader, topic=DELETE),
    C.GET_ALL_TOPIC_CONFIG: ADMITTED,
    C.GET_TOPIC_CONFIG: _header(admin.GetTopicConfigHeader, topic=PUB | SUB | GET),
    C.GET_TOPIC_STATS_INFO: _header(admin.GetTopicStatsHeader, topic=GET),
    C.QUERY_CONSUME_QUEUE: _header(
        admin.QueryConsumeQueueHeader, topic=SUB | GET, consumer_group=SUB | GET
    ),
    C.COMPACT_TOPIC: _header(h.CompactTopicHeader, topic=UPDATE),
    C.LIST_TIMERS: _header(h.ListTimersHeader, topic=GET),
    C.LIST_TRANSACTIONS: ADMITTED,
    C.RESUME_CHECK_HALF_MESSAGE: _header(
        admin.ResumeCheckHalfMessageHeader, topic=UPDATE, otherwise=UPDATE
    ),
    C.TIER_STATUS: _header(tier.TierStatusHeader, topic=GET),
    C.TIER_PLAN: _header(tier.TierPlanHeader, topic=SUB | GET),
    C.TIER_RESUME: _header(tier.TierResumeHeader, topic=UPDATE, otherwise=UPDATE),
    C.TIER_FORGET: _header(tier.TierForgetHeader, topic=DELETE),
    # -- groups
    C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _read(_created_group, CREATE),
    C.DELETE_SUBSCRIPTIONGROUP: _header(admin.DeleteSubscriptionGroupHeader, group_name=DELETE),
    C.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: ADMITTED,
    C.GET_CONSUMER_CONNECTION_LIST: _header(h.ConsumerGroupHeader, consumer_group=GET),
    C.GET_CONSUMER_RUNNING_INFO: _header(h.GetConsumerRunningInfoHeader, consumer_group=GET),
    C.CONSUME_MESSAGE_DIRECTLY: _header(admin.ConsumeDirectlyHeader, topic=SUB, consumer_group=SUB),
    C.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _header(
        admin.GetConsumerStatusHeader, topic=GET, group=GET
    ),
    C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _read(_created_groups, CREATE),
    C.GET_SUBSCRIPTIONGROUP_CONFIG: _header(admin.GroupHeader, group=GET),
    C.QUERY_TOPICS_BY_CONSUMER: _header(admin.GroupHeader, group=GET),
    C.QUERY_SUBSCRIPTION_BY_CONSUMER: _header(admin.GroupOfTopicHeader, topic=GET, group=GET),
    C.UPDATE_AND_GET_GROUP_FORBIDDEN: _header(admin.GroupOfTopicHeader, topic=UPDATE, group=UPDATE),
    C.QUERY_CORRECTION_OFFSET: _header(
        admin.QueryCorrectionOffsetHeader, topic=GET, compare_group=GET
    ),
    C.DESCRIBE_GROUP: _header(h.ConsumerGroupHeader, consumer_group=GET),
    C.GET_CONSUME_STATS: _header(admin.GetConsumeStatsHeader, topic=GET, consumer_group=GET),
    C.QUERY_TOPIC_CONSUME_BY_WHO: _header(admin.QueryTopicConsumeByWhoHeader, topic=GET),
    C.QUERY_CONSUME_TIME_SPAN: _header(admin.QueryConsumeTimeSpanHeader, topic=GET, group=GET),
    # -- brokers
    C.GET_PRODUCER_CONNECTION_LIST: _cluster(GET),
    C.GET_ALL_PRODUCER_INFO: _cluster(GET),
    C.GET_BROKER_CONSUME_STATS: _cluster(GET),
    C.VIEW_BROKER_STATS_DATA: _cluster(GET),
    C.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _cluster(GET),
    C.CLEAN_EXPIRED_CONSUMEQUEUE: _cluster(UPDATE),
    C.CLEAN_UNUSED_TOPIC: _cluster(UPDATE),
    C.GET_BROKER_HA_STATUS: _cluster(GET),
    C.SET_COMMITLOG_READ_MODE: _cluster(UPDATE),
    C.SWITCH_TIMER_ENGINE: _cluster(UPDATE),
    C.GET_BROKER_RUNTIME_INFO: _cluster(GET),
    C.GET_BROKER_CONFIG: _cluster(GET),
    C.UPDATE_BROKER_CONFIG: _cluster(UPDATE),
    C.TRIGGER_DELETE_FILES: _cluster(UPDATE),
    C.DELETE_EXPIRED_COMMITLOG: _cluster(UPDATE),
    C.GET_TIMER_CHECK_POINT: _cluster(GET),
    C.GET_TIMER_METRICS: _cluster(GET),
    C.SET_QUOTA: _cluster(UPDATE),
    C.LIST_QUOTAS: _cluster(GET),
    # -- nameservers
    C.REGISTER_BROKER: _header(ns.RegisterBrokerHeader, cluster_name=UPDATE),
    C.UNREGISTER_BROKER: _header(ns.UnregisterBrokerHeader, cluster_name=UPDATE),
    C.BROKER_HEARTBEAT: _header(ns.BrokerHeartbeatHeader, cluster_name=UPDATE),
    C.QUERY_DATA_VERSION: _header(ns.QueryDataVersionHeader, cluster_name=UPDATE | GET),
    C.GET_BROKER_MEMBER_GROUP: _header(ns.GetBrokerMemberGroupHeader, cluster_name=UPDATE | GET),
    C.GET_ROUTEINFO_BY_TOPIC: _read(_route, PUB | SUB | GET),
    C.GET_BROKER_CLUSTER_INFO: ADMITTED,
    C.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: ADMITTED,
    C.GET_TOPICS_BY_CLUSTER: ADMITTED,
    C.GET_SYSTEM_TOPIC_LIST_FROM_NS: ADMITTED,
    C.GET_UNIT_TOPIC_LIST: ADMITTED,
    C.GET_HAS_UNIT_SUB_TOPIC_LIST: ADMITTED,
    C.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: ADMITTED,
    C.DELETE_TOPIC_IN_NAMESRV: _header(
        ns.TopicInNamesrvHeader, cluster_name=UPDATE, otherwise=UPDATE
    ),
    C.REGISTER_TOPIC_IN_NAMESRV: _cluster(UPDATE),
    C.WIPE_WRITE_PERM_OF_BROKER: _cluster(UPDATE),
    C.ADD_WRITE_PERM_OF_BROKER: _cluster(UPDATE),
    C.FORGET_BROKER: _cluster(UPDATE),
    C.PUT_KV_CONFIG: _cluster(UPDATE),
    C.DELETE_KV_CONFIG: _cluster(UPDATE),
    C.GET_KV_CONFIG: _cluster(GET),
    C.GET_NAMESRV_CONFIG: _cluster(GET),
    C.UPDATE_NAMESRV_CONFIG: _cluster(UPDATE),
    C.GET_KVLIST_BY_NAMESPACE: _cluster(GET),
    # -- users and rules
    C.AUTH_SESSION: ANYBODY,
    C.AUTH_CREATE_USER: _cluster(UPDATE),
    C.AUTH_UPDATE_USER: _cluster(UPDATE),
    C.AUTH_DELETE_USER: _cluster(UPDATE),
    C.AUTH_GET_USER: _cluster(GET),
    C.AUTH_LIST_USER: _cluster(GET),
    C.AUTH_CREATE_ACL: _cluster(UPDATE),
    C.AUTH_UPDATE_ACL: _cluster(UPDATE),
    C.AUTH_DELETE_ACL: _cluster(UPDATE),
    C.AUTH_GET_ACL: _cluster(GET),
    C.AUTH_LIST_ACL: _cluster(GET),
}

_KINDS: Final = {
    "topic": Kind.TOPIC,
    "consumer_group": Kind.GROUP,
    "dest_group": Kind.GROUP,
    "compare_group": Kind.GROUP,
    "group": Kind.GROUP,
    "group_name": Kind.GROUP,
    "src_group": Kind.GROUP,
    "cluster_name": Kind.CLUSTER,
}


def wanted(request: Request) -> Iterable[Wanted]:
    """The rights that a request needs, all of them.

    Raises RequestError for a code without a row, and for a body out of bounds; MsgspecError for a
    malformed header or body.
    """
    code = request.command.code
    row = TABLE.get(code)
    if row is None:
        raise RequestError(
            ResponseCode.NO_PERMISSION, f"{code_name(code)} is permitted to Super users only"
        )
    found = _named(row, request)
    if row.read is not None:
        found += row.read(request, row.actions)
    elif row.actions and not found:
        found.append(Wanted(Kind.CLUSTER, OWN_CLUSTER, row.actions))
    return found


def _named(row: Row, request: Request) -> list[Wanted]:
    if row.header is None:
        return []
    header = request.header(row.header)
    found = []
    for attribute, actions in row.names.items():
        name = getattr(header, attribute)
        if name is not None:
            kind = _KINDS[attribute]
            is_topic = kind is Kind.TOPIC
            found.append(
                wanted_of_topic(name, actions) if is_topic else Wanted(kind, name, actions)
            )
    return found


def _is_change(row: Row) -> bool:
    return any(actions and actions <= _CHANGES for actions in (row.actions, *row.names.values()))


_USERS: Final = range(C.AUTH_CREATE_USER, C.AUTH_LIST_ACL + 1)
# Codes that change topics, groups or the cluster, and all of users and rules.
ADMINISTRATIVE: Final = frozenset(
    code for code, row in TABLE.items() if _is_change(row) or code in _USERS
)


def is_administrative(code: int) -> bool:
    """True for a code that changes topics, groups or the cluster, and for users and rules."""
    return code in ADMINISTRATIVE
