package org.apache.rocketmq.test.base;

import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.common.attribute.CQType;
import org.apache.rocketmq.common.attribute.TopicMessageType;
import org.apache.rocketmq.test.util.MQAdminTestUtils;

/** Creates topics on the brokers that run already. */
public final class IntegrationTestBase {
    private static final int CREATE_TIMEOUT_S = 30;

    private IntegrationTestBase() {
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
        return MQAdminTestUtils.createTopic(
            nameserver, cluster, topic, queues, attributes, CREATE_TIMEOUT_S);
    }
}
