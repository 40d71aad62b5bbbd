package org.apache.rocketmq.test.base;

import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.attribute.CQType;
import org.apache.rocketmq.common.attribute.TopicMessageType;
import org.apache.rocketmq.test.util.MQAdminTestUtils;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Creates topics on the brokers that run already: on all of a cluster, or on one that is named in
 * the cluster's place, since each of Apache's brokers is a cluster of its own in these tests.
 */
public final class IntegrationTestBase {
    static final int QUEUES = 8;

    private static final int CREATE_TIMEOUT_S = 30;

    private IntegrationTestBase() {
    }

    public static boolean initTopic(
        String topic, String nameserver, String cluster, CQType queueType
    ) {
        return initTopic(
            topic, nameserver, cluster, QUEUES, queueType, TopicMessageType.NORMAL);
    }

    public static boolean initTopic(
        String topic,
        String nameserver,
        String cluster,
        int queues,
        CQType queueType,
        TopicMessageType messageType
    ) {
        Map<String, String> attributes = new HashMap<>();
        if (queueType != CQType.SimpleCQ) {
            attributes.put("+queue.type", queueType.toString());
        }
        if (messageType != TopicMessageType.NORMAL) {
            attributes.put("+message.type", messageType.getValue());
        }
        BrokerController only = BaseConf.broker(cluster);
        if (only == null) {
            return MQAdminTestUtils.createTopic(
                nameserver, cluster, topic, queues, attributes, CREATE_TIMEOUT_S);
        }
        TopicConfig settings = new TopicConfig(topic, queues, queues);
        settings.setAttributes(attributes);
        return create(nameserver, only.getBrokerAddr(), settings);
    }

    private static boolean create(String nameserver, String address, TopicConfig settings) {
        DefaultMQAdminExt admin = BaseConf.getAdmin(nameserver);
        try {
            admin.start();
            admin.createAndUpdateTopicConfig(address, settings);
            return MQAdminTestUtils.checkTopicExist(admin, settings.getTopicName());
        } catch (Exception failure) {
            throw new IllegalStateException(failure);
        }
    }
}
