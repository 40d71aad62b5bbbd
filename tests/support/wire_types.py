"""Which struct reads which header and body: what the services of both daemons take and give."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_protocol import bodies, headers
from headrace_protocol.codes import RequestCode as Code

if TYPE_CHECKING:
    import msgspec

    from headrace_protocol.bodies import Body

REQUEST_HEADERS: dict[int, type[msgspec.Struct]] = {
    Code.SEND_MESSAGE: headers.SendMessageHeader,
    Code.PULL_MESSAGE: headers.PullMessageHeader,
    Code.QUERY_MESSAGE: headers.QueryMessageHeader,
    Code.QUERY_CONSUMER_OFFSET: headers.QueryConsumerOffsetHeader,
    Code.UPDATE_CONSUMER_OFFSET: headers.UpdateConsumerOffsetHeader,
    Code.UPDATE_AND_CREATE_TOPIC: headers.CreateTopicHeader,
    Code.GET_ALL_TOPIC_CONFIG: headers.GetAllTopicConfigHeader,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: headers.SearchOffsetHeader,
    Code.GET_MAX_OFFSET: headers.GetMaxOffsetHeader,
    Code.GET_MIN_OFFSET: headers.GetMinOffsetHeader,
    Code.GET_EARLIEST_MSG_STORETIME: headers.GetEarliestMsgStoretimeHeader,
    Code.VIEW_MESSAGE_BY_ID: headers.ViewMessageHeader,
    Code.UNREGISTER_CLIENT: headers.UnregisterClientHeader,
    Code.CONSUMER_SEND_MSG_BACK: headers.ConsumerSendMsgBackHeader,
    Code.GET_CONSUMER_LIST_BY_GROUP: headers.ConsumerGroupHeader,
    Code.NOTIFY_CONSUMER_IDS_CHANGED: headers.ConsumerGroupHeader,
    Code.PUT_KV_CONFIG: headers.PutKVConfigHeader,
    Code.GET_KV_CONFIG: headers.KVKeyHeader,
    Code.DELETE_KV_CONFIG: headers.KVKeyHeader,
    Code.REGISTER_BROKER: headers.RegisterBrokerHeader,
    Code.UNREGISTER_BROKER: headers.UnregisterBrokerHeader,
    Code.GET_ROUTEINFO_BY_TOPIC: headers.GetRouteInfoHeader,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: headers.GetAllSubscriptionGroupHeader,
    Code.GET_TOPIC_STATS_INFO: headers.GetTopicStatsHeader,
    Code.GET_CONSUMER_CONNECTION_LIST: headers.ConsumerGroupHeader,
    Code.GET_CONSUMER_RUNNING_INFO: headers.GetConsumerRunningInfoHeader,
    Code.DESCRIBE_GROUP: headers.ConsumerGroupHeader,
    Code.GET_PRODUCER_CONNECTION_LIST: headers.GetProducerConnectionListHeader,
    Code.WIPE_WRITE_PERM_OF_BROKER: headers.WritePermOfBrokerHeader,
    Code.DELETE_SUBSCRIPTIONGROUP: headers.DeleteSubscriptionGroupHeader,
    Code.GET_CONSUME_STATS: headers.GetConsumeStatsHeader,
    Code.DELETE_TOPIC_IN_BROKER: headers.DeleteTopicHeader,
    Code.DELETE_TOPIC_IN_NAMESRV: headers.TopicInNamesrvHeader,
    Code.REGISTER_TOPIC_IN_NAMESRV: headers.TopicInNamesrvHeader,
    Code.GET_KVLIST_BY_NAMESPACE: headers.KVNamespaceHeader,
    Code.RESET_CONSUMER_CLIENT_OFFSET: headers.ResetOffsetHeader,
    Code.INVOKE_BROKER_TO_RESET_OFFSET: headers.ResetOffsetHeader,
    Code.GET_TOPICS_BY_CLUSTER: headers.GetTopicsByClusterHeader,
    Code.QUERY_TOPIC_CONSUME_BY_WHO: headers.QueryTopicConsumeByWhoHeader,
    Code.QUERY_CONSUME_TIME_SPAN: headers.QueryConsumeTimeSpanHeader,
    Code.SEND_MESSAGE_V2: headers.SendMessageHeaderV2,
    Code.CLONE_GROUP_OFFSET: headers.CloneGroupOffsetHeader,
    Code.SEND_BATCH_MESSAGE: headers.SendMessageHeaderV2,
    Code.QUERY_CONSUME_QUEUE: headers.QueryConsumeQueueHeader,
    Code.QUERY_DATA_VERSION: headers.QueryDataVersionHeader,
    Code.ADD_WRITE_PERM_OF_BROKER: headers.WritePermOfBrokerHeader,
    Code.GET_TOPIC_CONFIG: headers.GetTopicConfigHeader,
    Code.LITE_PULL_MESSAGE: headers.PullMessageHeader,
    Code.GET_BROKER_MEMBER_GROUP: headers.GetBrokerMemberGroupHeader,
    Code.BROKER_HEARTBEAT: headers.BrokerHeartbeatHeader,
    Code.BULK_SEND: headers.BulkSendHeader,
    Code.BULK_PULL: headers.BulkPullHeader,
    Code.STAGE_SEND: headers.StageSendHeader,
    Code.STAGE_SEAL: headers.StageSealHeader,
    Code.STAGE_STATE: headers.StageQueryHeader,
    Code.STAGE_DECIDE: headers.StageDecideHeader,
    Code.STAGE_COMMIT: headers.StageCommitHeader,
    Code.STAGE_ABORT: headers.StageAbortHeader,
    Code.STAGE_FORGET: headers.StageQueryHeader,
}

RESPONSE_HEADERS: dict[int, type[msgspec.Struct]] = {
    Code.SEND_MESSAGE: headers.SendMessageResponseHeader,
    Code.PULL_MESSAGE: headers.PullMessageResponseHeader,
    Code.QUERY_MESSAGE: headers.QueryMessageResponseHeader,
    Code.QUERY_CONSUMER_OFFSET: headers.OffsetResponseHeader,
    Code.GET_ALL_TOPIC_CONFIG: headers.GetAllTopicConfigResponseHeader,
    Code.GET_BROKER_CONFIG: headers.GetBrokerConfigResponseHeader,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: headers.OffsetResponseHeader,
    Code.GET_MAX_OFFSET: headers.OffsetResponseHeader,
    Code.GET_MIN_OFFSET: headers.OffsetResponseHeader,
    Code.GET_EARLIEST_MSG_STORETIME: headers.TimestampResponseHeader,
    Code.HEART_BEAT: headers.HeartbeatResponseHeader,
    Code.GET_KV_CONFIG: headers.GetKVConfigResponseHeader,
    Code.REGISTER_BROKER: headers.RegisterBrokerResponseHeader,
    Code.GET_ROUTEINFO_BY_TOPIC: headers.GetRouteInfoResponseHeader,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: headers.GetAllSubscriptionGroupResponseHeader,
    Code.WIPE_WRITE_PERM_OF_BROKER: headers.WipeWritePermOfBrokerResponseHeader,
    Code.SEND_MESSAGE_V2: headers.SendMessageResponseHeader,
    Code.SEND_BATCH_MESSAGE: headers.SendMessageResponseHeader,
    Code.QUERY_DATA_VERSION: headers.QueryDataVersionResponseHeader,
    Code.ADD_WRITE_PERM_OF_BROKER: headers.AddWritePermOfBrokerResponseHeader,
    Code.LITE_PULL_MESSAGE: headers.PullMessageResponseHeader,
    Code.BULK_SEND: headers.SendMessageResponseHeader,
    Code.BULK_PULL: headers.BulkPullResponseHeader,
}

REQUEST_BODIES: dict[int, type[Body]] = {
    Code.HEART_BEAT: bodies.HeartbeatData,
    Code.LOCK_BATCH_MQ: bodies.LockBatchRequestBody,
    Code.UNLOCK_BATCH_MQ: bodies.LockBatchRequestBody,
    Code.CHECK_CLIENT_CONFIG: bodies.CheckClientRequestBody,
    Code.REGISTER_BROKER: bodies.RegisterBrokerBody,
    Code.UPDATE_AND_CREATE_TOPIC_LIST: bodies.CreateTopicListRequestBody,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: bodies.SubscriptionGroupConfig,
    Code.REGISTER_TOPIC_IN_NAMESRV: bodies.TopicRouteData,
    Code.RESET_CONSUMER_CLIENT_OFFSET: bodies.ResetOffsetBody,
    Code.QUERY_DATA_VERSION: bodies.DataVersion,
    Code.QUERY_ASSIGNMENT: bodies.QueryAssignmentRequestBody,
    Code.SET_MESSAGE_REQUEST_MODE: bodies.SetMessageRequestModeRequestBody,
    Code.UPDATE_AND_CREATE_STATIC_TOPIC: bodies.TopicQueueMappingDetail,
}

RESPONSE_BODIES: dict[int, type[Body]] = {
    Code.GET_ALL_TOPIC_CONFIG: bodies.TopicConfigSerializeWrapper,
    Code.GET_BROKER_RUNTIME_INFO: bodies.KVTable,
    Code.GET_CONSUMER_LIST_BY_GROUP: bodies.GetConsumerListByGroupResponseBody,
    Code.LOCK_BATCH_MQ: bodies.LockBatchResponseBody,
    Code.GET_ALL_CONSUMER_OFFSET: bodies.ConsumerOffsetSerializeWrapper,
    Code.REGISTER_BROKER: bodies.KVTable,
    Code.GET_ROUTEINFO_BY_TOPIC: bodies.TopicRouteData,
    Code.GET_BROKER_CLUSTER_INFO: bodies.ClusterInfo,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: bodies.SubscriptionGroupWrapper,
    Code.GET_TOPIC_STATS_INFO: bodies.TopicStatsTable,
    Code.GET_CONSUMER_CONNECTION_LIST: bodies.ConsumerConnection,
    Code.GET_CONSUMER_RUNNING_INFO: bodies.ConsumerRunningInfo,
    Code.DESCRIBE_GROUP: bodies.GroupDescription,
    Code.GET_PRODUCER_CONNECTION_LIST: bodies.ProducerConnection,
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: bodies.TopicList,
    Code.GET_CONSUME_STATS: bodies.ConsumeStats,
    Code.GET_KVLIST_BY_NAMESPACE: bodies.KVTable,
    Code.INVOKE_BROKER_TO_RESET_OFFSET: bodies.ResetOffsetBody,
    Code.GET_TOPICS_BY_CLUSTER: bodies.TopicList,
    Code.QUERY_TOPIC_CONSUME_BY_WHO: bodies.GroupList,
    Code.QUERY_CONSUME_TIME_SPAN: bodies.QueryConsumeTimeSpanBody,
    Code.QUERY_CONSUME_QUEUE: bodies.QueryConsumeQueueResponseBody,
    Code.GET_TOPIC_CONFIG: bodies.TopicConfigAndQueueMapping,
    Code.QUERY_ASSIGNMENT: bodies.QueryAssignmentResponseBody,
    Code.GET_BROKER_MEMBER_GROUP: bodies.GetBrokerMemberGroupResponseBody,
}

# Responses whose body is records as the log holds them, back to back.
RECORD_RESPONSES = frozenset(
    {
        Code.PULL_MESSAGE,
        Code.LITE_PULL_MESSAGE,
        Code.QUERY_MESSAGE,
        Code.VIEW_MESSAGE_BY_ID,
        Code.POP_MESSAGE,
    }
)
