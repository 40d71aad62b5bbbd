package headrace.bench;

import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** A new group reads a filled topic; measured from its first batch to its last message. */
final class Drains {
    static final int BATCH_MESSAGES = 32;
    private static final long POLL_MILLIS = 1000;
    private static final int POLLS_MAX = 120;

    private final Job job;
    private final Arrivals arrivals;

    private Drains(Job job, Meter meter) {
        this.job = job;
        arrivals = new Arrivals(job, meter);
    }

    static void run(Job job, Meter meter) throws Exception {
        Drains drains = new Drains(job, meter);
        switch (job.work()) {
            case "drain_lite" -> drains.lite();
            case "drain_push" -> drains.push();
            default -> throw new IllegalArgumentException(job.work());
        }
    }

    private void lite() throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(job.group());
        consumer.setNamesrvAddr(job.nameserver());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(BATCH_MESSAGES);
        consumer.setHeartbeatBrokerInterval(1000);
        consumer.subscribe(job.topic(), "*");
        consumer.start();
        try {
            for (int empty = 0; !arrivals.isComplete() && empty < POLLS_MAX;) {
                int messages = consumer.poll(POLL_MILLIS).size();
                empty = messages == 0 ? empty + 1 : 0;
                arrivals.count(messages);
            }
            arrivals.await();
        } finally {
            consumer.shutdown();
        }
    }

    private void push() throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer(job);
        consumer.setPullBatchSize(BATCH_MESSAGES);
        consumer.setConsumeMessageBatchMaxSize(BATCH_MESSAGES);
        consumer.registerMessageListener(this::consume);
        consumer.start();
        try {
            arrivals.await();
        } finally {
            consumer.shutdown();
        }
    }

    /** A consumer of the job's topic that has not been started. */
    static DefaultMQPushConsumer pushConsumer(Job job) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(job.group());
        consumer.setNamesrvAddr(job.nameserver());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setHeartbeatBrokerInterval(1000);
        consumer.setClientRebalance(!job.pop());
        consumer.subscribe(
            job.topic(),
            job.filter() == null
                ? MessageSelector.byTag("*")
                : MessageSelector.bySql(job.filter()));
        return consumer;
    }

    private ConsumeConcurrentlyStatus consume(
            List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        arrivals.count(messages.size());
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }
}
