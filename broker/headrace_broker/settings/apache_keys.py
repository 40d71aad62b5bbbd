"""Keys of Apache RocketMQ's broker.conf (5.5.0) that this broker has no use for.

A file that holds them shall start this broker as well, as long as it promises nothing that this
broker would not keep.
"""

from __future__ import annotations

# What these ask for is missing here, unless they have the value of the peer's default.
EXPECTED_VALUES = {
    "aclEnable": "false",
    "migrateAuthFromV1Enabled": "false",
    "useTLS": "false",
    "brokerRole": "ASYNC_MASTER",
    "duplicationEnable": "false",
    "enableDLegerCommitLog": "false",
    "enableControllerMode": "false",
    "enableSlaveActingMaster": "false",
    "isBrokerContainer": "false",
    "isInBrokerContainer": "false",
    "allAckInSyncStateSet": "false",
    "totalReplicas": "1",
    "inSyncReplicas": "1",
    "minInSyncReplicas": "1",
    "storeType": "default",
    "tieredMetadataServiceProvider": (
        "org.apache.rocketmq.tieredstore.metadata.DefaultMetadataStore"
    ),
    "tieredStoreGroupCommit": "true",
    "readOnlyCommitLogStorePaths": "",
    "enableConsumeQueueExt": "false",
    "enableLmq": "false",
    "enableMultiDispatch": "false",
    "indexRocksDBEnable": "false",
    "timerRocksDBEnable": "false",
    "transRocksDBEnable": "false",
    "messageIndexEnable": "true",
    "fetchNamesrvAddrByAddressServer": "false",
    "fetchNameSrvAddrByDnsLookup": "false",
}

_AUTH = "org.apache.rocketmq.auth."
# The peer's own classes stand for what this broker does; it has no others. A decision holds for as
# long as the rules behind it, so both strategies are the same.
CLASSES = {
    "authenticationProvider": ("DefaultAuthenticationProvider",),
    "authenticationMetadataProvider": ("LocalAuthenticationMetadataProvider",),
    "authenticationStrategy": (
        "StatelessAuthenticationStrategy",
        "StatefulAuthenticationStrategy",
    ),
    "authorizationProvider": ("DefaultAuthorizationProvider",),
    "authorizationMetadataProvider": ("LocalAuthorizationMetadataProvider",),
    "authorizationStrategy": ("StatelessAuthorizationStrategy", "StatefulAuthorizationStrategy"),
}


def has_no_effect(key: str, value: str) -> bool:
    """True if the peer's key, with this value, asks for nothing that this broker lacks."""
    if key in CLASSES:
        package, _, name = value.rpartition(".")
        return not value or (f"{package}.".startswith(_AUTH) and name in CLASSES[key])
    return key in WITHOUT_EFFECT or EXPECTED_VALUES.get(key) == value


# How the peer's threads, caches and optional services are tuned: no promise to anybody.
_WITHOUT_EFFECT = """
    accessMessageInMemoryHotRatio accessMessageInMemoryMaxRatio accountStatsEnable
    accountStatsPrintZeroValues ackMessageThreadPoolNums ackThreadPoolQueueCapacity
    aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond adminBrokerThreadPoolNums
    adminBrokerThreadPoolQueueCapacity allowRecallWhenBrokerNotWriteable appendAckAsync
    appendCkAsync appendTopicForTimerDeleteKey asyncLearner asyncSendEnable authConfigPath
    autoDeleteUnusedStats
    autoMessageVersionOnTopicLen batchDispatchRequestThreadPoolNums bitMapLengthConsumeQueueExt
    bottomMostCompressionTypeForConsumeQueueStore broadcastOffsetExpireMaxSecond
    broadcastOffsetExpireSecond brokerConfigPath brokerElectionPriority brokerFastFailureEnable
    brokerHeartbeatInterval brokerIP2 brokerNotActiveTimeoutMillis cgColdReadThreshold
    channelExpiredTimeout channelNotActiveInterval checkCRCOnRecover checkCommitLogOffsetOnRecover
    checkSyncStateSetPeriod cleanOfflineBrokerInterval
    cleanRocksDBDirtyCQIntervalMin cleanSwapedMapInterval clearRetryTopicWhenDeleteTopic
    clientAsyncSemaphoreValue clientCallbackExecutorThreads clientChannelMaxIdleTimeSeconds
    clientCloseSocketIfTimeout clientManageThreadPoolNums clientManagerThreadPoolQueueCapacity
    clientOnewaySemaphoreValue clientPooledByteBufAllocatorEnable clientSocketRcvBufSize
    clientSocketSndBufSize clientWorkerThreads clusterName coldCtrStrategyEnable
    coldDataFlowControlEnable coldDataScanEnable combineAssignOffsetCQType
    combineCQEnableCheckSelf combineCQLoadingCQTypes combineCQMaxExtraSearchCommitLogFiles
    combineCQPreferCQType combineCQUseRocksdbForLmq commercialBaseCount commercialSizePerMsg
    commitCommitLogLeastPages commitCommitLogThoroughInterval commitIntervalCommitLog
    commitLogForceSwapMapInterval commitLogRecoverMaxNum commitLogSwapMapInterval
    commitLogSwapMapReserveFileNum
    compatibleWithOldNameSrv compressedRegister configBlackList
    configManagerVersion configName connectTimeoutMillis consumerFallbehindThreshold
    consumerManageThreadPoolNums consumerManagerThreadPoolQueueCapacity
    consumerOffsetUpdateVersionStep controllerAddr controllerHeartBeatTimeoutMills
    correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval dLegerGroup dLegerPeers
    dLegerSelfId dataReadAheadEnable debugLockEnable defaultQueryMaxNum
    delayOffsetUpdateVersionStep deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval
    destroyMapedFileIntervalForcibly disableCallbackExecutor
    disableConsumeIfConsumerReadSlowly disableNettyWorkerGroup disappearTimeAfterStart
    diskFallRecorded
    dispatchCqCacheNum dispatchCqThreads dispatchFromSenderThread enableAcceleratedRecovery
    enableAsyncReput enableAutoInSyncReplicas enableBatchPush enableBroadcastOffsetStore
    enableBuildConsumeQueueConcurrently enableCalcFilterBitMap enableCleanExpiredOffset
    enableConnectionMetrics enableCreateSysGroup enableDetailStat
    enableFastChannelEventProcess enableLagAndDlqMetrics enableLiteEventMode enableLitePopLog
    enableLmqQuota enableLmqStats enableLogConsumeQueueRepeatedlyBuildWhenRecover
    enableMessageStoreMetrics enableMixedMessageType enableNetWorkFlowControl
    enableNotifyAfterPopOrderLockRelease enableNotifyBeforePopCalculateLag enablePopBatchAck
    enablePopBufferMerge enablePopLog enablePopMetrics
    enableReconnectForGoAway enableRegisterProducer enableRemoteEscape enableRemotingMetrics
    enableRequestMetrics enableRocksDBLog enableRunningFlagsInFlush
    enableScheduleAsyncDeliver enableScheduleMessageStats enableShutdownGracefully
    enableSingleTopicRegister enableSkipLongAwaitingAck enableSplitMetadata
    enableSplitRegistration enableStatsMetrics enableTransactionMetrics
    endTransactionPoolQueueCapacity endTransactionThreadPoolNums estimateAccumulation
    expectConsumerNumUseFilter fastFailIfNoBufferInStorePool fetchControllerAddrByDnsLookup
    fetchNamesrvAddrInterval filterDataCleanTimeSpan flushCommitLogTimed
    flushConsumerOffsetHistoryInterval flushLeastPagesWhenWarmMapedFile
    forceRegister forceVerifyPropCRC globalColdReadThreshold haFlowControlEnable
    haHousekeepingInterval haListenPort haMasterAddress haMaxGapNotInSync haMaxTimeSlaveNotCatchup
    haSendHeartbeatInterval haTransferBatchSize heartbeatThreadPoolNums
    heartbeatThreadPoolQueueCapacity highSpeedMode indexFileReadEnable indexFileWriteEnable
    initPopOffsetByCheckMsgInMem isScanAvailableNameSrv isolateLogEnable
    iteratorWhenUseRocksdbConsumeQueue
    liteEventCheckInterval liteEventFullDispatchDelayTime
    liteEventFullDispatchDelayTimeForWildcardGroup liteLagCountMetricsEnable
    liteLagLatencyCollectEnable liteLagLatencyMetricsEnable liteLagLatencyTopK
    litePullMessageEnable litePullMessageThreadPoolNums litePullThreadPoolQueueCapacity
    liteSubscriptionCheckInterval liteSubscriptionCheckTimeoutMills liteTtlCheckInterval
    loadBalancePollNameServerInterval loadBalanceProcessorThreadPoolNums
    loadBalanceThreadPoolQueueCapacity lockInStrictMode logicQueueForceSwapMapInterval
    logicQueueSwapMapInterval logicQueueSwapMapReserveFileNum
    logicalDiskSpaceCleanForciblyThreshold mappedFileSizeConsumeQueueExt
    mappedFileSwapEnable maxAsyncPutMessageRequests
    maxBatchDeleteFilesNum maxChecksumRange maxClientEventCount maxConsumeQueueScan
    maxErrorRateOfBloomFilter maxHaTransferByteInSecond
    maxLiteSubscriptionCount maxLmqConsumeQueueNum maxMessageFilterNumForNotification
    maxMsgsNumBatch maxReconnectIntervalTimeSeconds
    maxRecoveryCommitlogFiles maxRocksDBIndexQueryDays maxSlaveResendLength
    maxStatsIdleTimeInMinutes maxTopicLength maxTransferBytesOnMessageInDisk
    maxTransferBytesOnMessageInMemory maxTransferCountOnMessageInDisk
    maxTransferCountOnMessageInMemory memTableFlushIntervalMs messageIndexSafe
    metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills
    metricLoggingExporterIntervalInMills metricsExportBatchMaxDataPoints metricsExporterType
    metricsGrpcExporterHeader metricsGrpcExporterTarget metricsInDelta metricsLabel
    metricsOtelCardinalityLimit metricsPromExporterHost metricsPromExporterPort
    minLiteTTl offsetCheckInSlave
    osPageCacheBusyTimeOutMills persistConsumerOffsetIncrementally popCkMaxBufferSize
    popCkOffsetMaxQueueSize popCkStayBufferTime popCkStayBufferTimeOut popConsumerFSServiceInit
    popConsumerKVServiceEnable popConsumerKVServiceInit popConsumerKVServiceLog
    popFromRetryProbabilityForPriority
    popLongPollingForceNotifyInterval popPollingMapExpireTimeSeconds popPollingMapSize
    popReviveConcurrency
    popReviveMaxReturnSizePerRead popReviveSkipIfGroupAbsent preferredLeaderId printChannelGroups
    printChannelGroupsMinNum priorityOrderAsc processReplyMessageThreadPoolNums
    pullBatchMaxMessageCount pullMessageThreadPoolNums pullThreadPoolQueueCapacity
    putConsumeQueueDataByFileChannel putMessageFutureThreadPoolNums putMessageTimeout
    putMsgIndexHightWater putThreadPoolQueueCapacity queryMessageThreadPoolNums
    queryThreadPoolQueueCapacity readUnCommitted realTimeNotifyConsumerChange
    readAheadCacheSizeThresholdRate realTimePersistRocksDBConfig recheckReputOffsetFromCq
    recordGetMessageResult recoverConcurrently
    recoverThreadPoolNums redeleteHangedFileInterval regionId registerBrokerTimeoutMills
    rejectPullConsumerEnable replicasPerDiskPartition
    replyThreadPoolQueueCapacity reviveAckWaitMs
    reviveMaxSlow reviveScanTime rocketmqHome rocksdbCQDoubleWriteEnable
    rocksdbCompressionType rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold
    sampleCountThreshold sampleSteps scheduleAsyncDeliverMaxPendingLimit
    scheduleAsyncDeliverMaxResendNum2Blocked searchBcqByCacheEnable sendHeartbeatTimeoutMillis
    sendMessageThreadPoolNums sendThreadPoolQueueCapacity serverAsyncSemaphoreValue
    serverCallbackExecutorThreads serverChannelMaxIdleTimeSeconds serverLoadBalancerEnable
    serverNettyWorkerGroupEnable serverOnewaySemaphoreValue serverPooledByteBufAllocatorEnable
    serverSelectorThreads serverSocketBacklog serverSocketRcvBufSize serverSocketSndBufSize
    serverWorkerThreads sharedByteBufferNum shortPollingTimeMills shutdownWaitTimeSeconds
    skipPreOnline skipWhenCKRePutReachMaxTimes slaveReadEnable slaveTimeout socksProxyConfig
    spinLockCollisionRetreatOptimalDegree splitMetadataSize splitRegistrationSize
    startAcceptSendRequestTimeStamp statRocksDBCQIntervalSec
    statefulAuthenticationCacheExpiredSecond statefulAuthenticationCacheMaxNum
    statefulAuthorizationCacheExpiredSecond statefulAuthorizationCacheMaxNum
    storePathBrokerIdentity storePathDLedgerCommitLog storePathEpochFile
    subscriptionExpiredTimeout syncBrokerMemberGroupPeriod syncBrokerMetadataPeriod
    syncControllerMetadataPeriod syncFlushTimeout syncFromLastFile
    syncMasterFlushOffsetWhenStartup tieredStoreMaxGroupCommitCount tieredStoreMaxPendingLimit
    timerCheckMetricsWhen timerColdDataCheckIntervalMs
    timerCongestNumEachSlot timerEnableCheckMetrics timerEnableDisruptor
    timerEnableRetryUntilSuccess timerGetMessageThreadNum
    timerInterceptDelayLevel timerMetricSmallThreshold
    timerProgressLogIntervalMs timerPutMessageThreadNum timerRecallToTimeWheelEnable
    timerRecallToTimelineEnable timerReputServiceCorePoolSize timerReputServiceMaxPoolSize
    timerReputServiceQueueCapacity timerRocksDBPrecisionMs timerRocksDBRollIntervalHours
    timerRocksDBRollMaxTps timerRocksDBRollRangeHours timerRocksDBStopScan
    timerRocksDBTimeExpiredMaxTps timerSkipUnknownError
    timerWarmEnable timerWheelSnapshotFlush
    timerWheelSnapshotIntervalMs topicQueueLockNum traceOn transWriteOriginTransHalfEnable
    transactionCheckRocksdbCoreThreads
    transactionCheckRocksdbMaxThreads transactionCheckRocksdbQueueCapacity
    transactionMetricFlushInterval transactionOpBatchInterval
    transferMsgByHeap transientStorePoolEnable transientStorePoolSize
    travelCqFileNumWhenGetMessage updateNameServerAddrPeriod useABSLock useEpollNativeSelector
    useMessageFilterForNotification usePIDColdCtrStrategy useReentrantLockWhenPutMessage
    useSeparateRetryQueue useSeparateStorePathForRocksdbCQ useSingleRocksDBForAllConfigs
    useStaticSubscription userCacheExpiredSecond userCacheMaxNum userCacheRefreshSecond
    validateSystemTopicWhenUpdateTopic waitTimeMillsInAckQueue waitTimeMillsInAdminBrokerQueue
    waitTimeMillsInHeartbeatQueue waitTimeMillsInLitePullQueue waitTimeMillsInPullQueue
    waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue wakeCommitWhenPutMessage
    wakeFlushWhenPutMessage warmMapedFileEnable writeBufferHighWaterMark writeBufferLowWaterMark
    writeWithoutMmap
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
