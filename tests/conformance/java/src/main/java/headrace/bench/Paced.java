package headrace.bench;

import java.nio.ByteBuffer;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends by a schedule that waits for nobody; latency counts from when a message was due.
 *
 * <p>A slow answer does not delay the sends behind it, so a pause is seen by every message that
 * falls into it. Messages of the window that are answered after it count too.
 */
final class Paced {
    private static final double RAMP_SECONDS = 0.5;
    private static final int TIMEOUT_SECONDS = 10;
    private static final int START_SECONDS = 60;
    private static final int PRIMING_ATTEMPTS = 100;
    /** Place in the schedule of what is sent before it begins. */
    private static final int NONE = Integer.MIN_VALUE;

    private final Job job;
    private final Meter meter;
    private final DefaultMQProducer producer;
    private final int ramp;
    /** By place in the schedule; 0 while there is no answer. */
    private final AtomicLongArray latencyNanos;
    private final AtomicInteger done = new AtomicInteger();
    private final AtomicInteger received = new AtomicInteger();
    private long startNanos;

    private Paced(Job job, Meter meter, DefaultMQProducer producer) {
        this.job = job;
        this.meter = meter;
        this.producer = producer;
        ramp = (int) (job.rate() * RAMP_SECONDS);
        latencyNanos = new AtomicLongArray((int) (job.rate() * job.seconds()));
    }

    static void run(Job job, Meter meter, DefaultMQProducer producer) throws Exception {
        Paced paced = new Paced(job, meter, producer);
        paced.prime();
        switch (job.work()) {
            case "paced" -> paced.measure(true);
            case "end_to_end" -> paced.endToEnd();
            default -> throw new IllegalArgumentException(job.work());
        }
    }

    /**
     * Creates the topic and learns its route before anything is measured; a broker under load may
     * refuse for a while.
     */
    private void prime() throws Exception {
        for (int attempt = 1; ; attempt++) {
            try {
                producer.send(new Message(job.topic(), body(NONE)));
                return;
            } catch (MQClientException | MQBrokerException refused) {
                if (attempt == PRIMING_ATTEMPTS) {
                    throw refused;
                }
            }
        }
    }

    private void endToEnd() throws Exception {
        DefaultMQPushConsumer consumer = Drains.pushConsumer(job);
        consumer.registerMessageListener(this::consume);
        consumer.start();
        try {
            waitForConsumer();
            measure(false);
        } finally {
            consumer.shutdown();
        }
    }

    /** Every queue hands over a message before the schedule begins. */
    private void waitForConsumer() throws Exception {
        int before = 1;
        for (int index = 0; index < 2 * Sends.QUEUES; index++, before++) {
            producer.send(new Message(job.topic(), body(NONE)));
        }
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(START_SECONDS);
        while (received.get() < before) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(
                    "received " + received.get() + " of " + before + " messages of " + job.topic());
            }
            Thread.sleep(10);
        }
    }

    private ConsumeConcurrentlyStatus consume(
            List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        for (MessageExt message : messages) {
            received.incrementAndGet();
            finished(ByteBuffer.wrap(message.getBody()).getInt());
        }
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    /** @param byAnswer a message is done when its send is answered, else when it is received */
    private void measure(boolean byAnswer) throws Exception {
        int count = latencyNanos.length();
        startNanos = System.nanoTime() + (long) (RAMP_SECONDS * 1e9);
        for (int place = -ramp; place < count; place++) {
            waitUntil(due(place));
            if (place == 0) {
                meter.open();
            }
            send(place, byAnswer ? new Answer(place) : new Ignored());
        }
        waitUntil(due(count));
        meter.close();
        waitForAnswers();
        meter.latencies(finalLatencies());
    }

    private long due(int place) {
        return startNanos + (long) (place * 1e9 / job.rate());
    }

    private static void waitUntil(long nanos) {
        for (long left; (left = nanos - System.nanoTime()) > 0;) {
            LockSupport.parkNanos(left);
        }
    }

    private void send(int place, SendCallback callback) {
        try {
            producer.send(new Message(job.topic(), body(place)), callback);
        } catch (Exception failure) {
            callback.onException(failure);
        }
    }

    private byte[] body(int place) {
        return ByteBuffer.allocate(job.bodyBytes()).putInt(place).array();
    }

    private void finished(int place) {
        meter.received(1);
        if (place >= 0 && latencyNanos.compareAndSet(place, 0, latency(place))) {
            done.incrementAndGet();
        }
    }

    /** Counts from when the message was due. */
    private long latency(int place) {
        return System.nanoTime() - due(place);
    }

    private void waitForAnswers() throws InterruptedException {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(TIMEOUT_SECONDS);
        while (done.get() < latencyNanos.length() && System.nanoTime() < deadline) {
            Thread.sleep(1);
        }
    }

    /** What was never answered counts with its age. */
    private long[] finalLatencies() {
        long[] latencies = new long[latencyNanos.length()];
        for (int place = 0; place < latencies.length; place++) {
            long latency = latencyNanos.get(place);
            latencies[place] = latency == 0 ? latency(place) : latency;
        }
        return latencies;
    }

    private class Ignored implements SendCallback {
        @Override
        public void onSuccess(SendResult result) {
        }

        @Override
        public void onException(Throwable failure) {
            meter.failed();
        }
    }

    private final class Answer extends Ignored {
        private final int place;

        Answer(int place) {
            this.place = place;
        }

        @Override
        public void onSuccess(SendResult result) {
            finished(place);
        }
    }
}
