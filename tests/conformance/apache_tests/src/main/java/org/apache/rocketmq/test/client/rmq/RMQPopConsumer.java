package org.apache.rocketmq.test.client.rmq;

import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.consumer.PopStatus;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.test.listener.AbstractListener;

/**
 * Reads a queue by pulls, for brokers without pop: the tests of recall only need its messages.
 *
 * <p>Stands on the class path before the class of the same name.
 */
public final class RMQPopConsumer extends RMQNormalConsumer {
    private static final int MESSAGES_MAX = 16;

    private final DefaultMQPullConsumer puller;
    private long offset;

    public RMQPopConsumer(
        String nameserver, String topic, String expression, String group, AbstractListener listener
    ) {
        super(nameserver, topic, expression, group, listener);
        puller = new DefaultMQPullConsumer(group);
        puller.setNamesrvAddr(nameserver);
        puller.setInstanceName(group);
    }

    @Override
    public void start() {
        try {
            puller.start();
        } catch (MQClientException failure) {
            throw new IllegalStateException(failure);
        }
    }

    @Override
    public void shutdown() {
        puller.shutdown();
    }

    public PopResult pop(String broker, MessageQueue queue, long invisibleMs, long timeoutMs)
        throws Exception {
        PullResult pulled = puller.pull(queue, "*", offset, MESSAGES_MAX);
        offset = pulled.getNextBeginOffset();
        PopStatus status = pulled.getPullStatus() == PullStatus.FOUND
            ? PopStatus.FOUND : PopStatus.NO_NEW_MSG;
        return new PopResult(status, pulled.getMsgFoundList());
    }
}
