package headrace.bench;

import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.RPCHook;

/** One sending job on the producer of its peer. */
final class Sends {
    static final int QUEUES = 8;
    static final int BATCH_MESSAGES = 100;
    private static final long RAMP_MILLIS = 300;
    private static final int TIMEOUT_MILLIS = 10_000;

    private final Job job;
    private final Meter meter;
    private final DefaultMQProducer producer;
    private final byte[] body;
    private volatile boolean isStopped;

    private Sends(Job job, Meter meter, DefaultMQProducer producer) {
        this.job = job;
        this.meter = meter;
        this.producer = producer;
        body = new byte[job.bodyBytes()];
        new Random(job.bodyBytes()).nextBytes(body);
    }

    static DefaultMQProducer startProducer(String nameserver) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench_producer", signer());
        producer.setNamesrvAddr(nameserver);
        producer.setDefaultTopicQueueNums(QUEUES);
        producer.setSendMsgTimeout(TIMEOUT_MILLIS);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.start();
        return producer;
    }

    /** Signs requests as the user that the JVM's properties name; null without one. */
    private static RPCHook signer() {
        String user = System.getProperty("bench.user");
        return user == null
            ? null
            : new AclClientRPCHook(
                new SessionCredentials(user, System.getProperty("bench.password")));
    }

    /** All threads share the producer and so one connection, as applications do. */
    static void run(Job job, Meter meter, DefaultMQProducer producer) throws Exception {
        Sends sends = new Sends(job, meter, producer);
        // Creates the topic and learns its route before anything is measured.
        sends.sendOne();
        switch (job.work()) {
            case "sync" -> sends.inThreads(sends::sendOne);
            case "batch" -> sends.inThreads(sends::sendBatch);
            case "async" -> sends.async();
            case "fill" -> sends.fill();
            case "request" -> {
                // The first waits for the consumer to find its queues.
                sends.request();
                sends.inThreads(sends::request);
            }
            default -> throw new IllegalArgumentException(job.work());
        }
    }

    @FunctionalInterface
    private interface Send {
        /** Returns how many messages it sent. */
        int run() throws Exception;
    }

    private int sendOne() throws Exception {
        producer.send(new Message(job.topic(), body));
        return 1;
    }

    private int sendBatch() throws Exception {
        List<Message> batch = new ArrayList<>(BATCH_MESSAGES);
        for (int index = 0; index < BATCH_MESSAGES; index++) {
            batch.add(job.filter() == null ? new Message(job.topic(), body) : filterable(index));
        }
        producer.send(batch);
        return BATCH_MESSAGES;
    }

    /** A message with properties; each place in a batch has its own. */
    private Message filterable(int place) {
        Message message = new Message(job.topic(), body);
        message.putUserProperty("place", Integer.toString(place));
        message.putUserProperty("region", place % 2 == 0 ? "north" : "south");
        message.putUserProperty("price", Integer.toString(place * 10));
        return message;
    }

    private int request() throws Exception {
        producer.request(new Message(job.topic(), body), TIMEOUT_MILLIS);
        return 1;
    }

    private void inThreads(Send send) throws Exception {
        List<Thread> threads = new ArrayList<>();
        for (int index = 0; index < job.threads(); index++) {
            threads.add(new Thread(() -> sendUntilStopped(send)));
        }
        threads.forEach(Thread::start);
        measure();
        for (Thread thread : threads) {
            thread.join();
        }
    }

    private void sendUntilStopped(Send send) {
        while (!isStopped) {
            long sent = System.nanoTime();
            try {
                meter.answered(sent, send.run());
            } catch (Exception failure) {
                meter.failed();
            }
        }
    }

    private void measure() throws Exception {
        Thread.sleep(RAMP_MILLIS);
        meter.open();
        Thread.sleep((long) (job.seconds() * 1000));
        meter.close();
        isStopped = true;
    }

    private void async() throws Exception {
        Semaphore free = new Semaphore(job.inFlight());
        Thread sender = new Thread(() -> sendAsyncUntilStopped(free));
        sender.start();
        measure();
        sender.join();
        free.tryAcquire(job.inFlight(), 10, TimeUnit.SECONDS);
    }

    private void sendAsyncUntilStopped(Semaphore free) {
        while (!isStopped) {
            free.acquireUninterruptibly();
            try {
                producer.send(new Message(job.topic(), body), new Answer(free));
            } catch (Exception failure) {
                meter.failed();
                free.release();
            }
        }
    }

    private void fill() throws Exception {
        meter.open();
        for (int sent = 0; sent < job.messages(); sent += BATCH_MESSAGES) {
            long start = System.nanoTime();
            meter.answered(start, sendBatch());
        }
        meter.close();
    }

    private final class Answer implements SendCallback {
        private final Semaphore free;
        private final long sent = System.nanoTime();

        Answer(Semaphore free) {
            this.free = free;
        }

        @Override
        public void onSuccess(SendResult result) {
            meter.answered(sent, 1);
            free.release();
        }

        @Override
        public void onException(Throwable failure) {
            meter.failed();
            free.release();
        }
    }
}
