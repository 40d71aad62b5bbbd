package headrace.bench;

import java.io.IOException;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** A new group reads a filled topic; measured from its first batch to its last message. */
final class Drains {
    private static final int BATCH_MESSAGES = 32;
    private static final int TIMEOUT_SECONDS = 120;

    private final Job job;
    private final Meter meter;
    private final AtomicInteger received = new AtomicInteger();
    private final CountDownLatch drained = new CountDownLatch(1);

    private Drains(Job job, Meter meter) {
        this.job = job;
        this.meter = meter;
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
            long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(TIMEOUT_SECONDS);
            while (drained.getCount() > 0 && System.nanoTime() < deadline) {
                count(consumer.poll(1000).size());
            }
            checkDrained();
        } finally {
            consumer.shutdown();
        }
    }

    private void push() throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(job.group());
        consumer.setNamesrvAddr(job.nameserver());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(BATCH_MESSAGES);
        consumer.setConsumeMessageBatchMaxSize(BATCH_MESSAGES);
        consumer.setHeartbeatBrokerInterval(1000);
        consumer.subscribe(job.topic(), "*");
        consumer.registerMessageListener(this::consume);
        consumer.start();
        try {
            drained.await(TIMEOUT_SECONDS, TimeUnit.SECONDS);
            checkDrained();
        } finally {
            consumer.shutdown();
        }
    }

    private ConsumeConcurrentlyStatus consume(
            List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        count(messages.size());
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    /** The batch that opens the window is not counted in it. */
    private void count(int messages) {
        if (messages == 0) {
            return;
        }
        int before = received.getAndAdd(messages);
        meter.received(messages);
        try {
            if (before == 0) {
                meter.open();
            }
            if (before < job.messages() && before + messages >= job.messages()) {
                meter.close();
                drained.countDown();
            }
        } catch (IOException brokerIsGone) {
            meter.failed();
        }
    }

    private void checkDrained() {
        if (drained.getCount() > 0) {
            throw new IllegalStateException(
                "drained " + received.get() + " of " + job.messages() + " messages of " + job.topic()
                    + " in " + TIMEOUT_SECONDS + " s");
        }
    }
}
