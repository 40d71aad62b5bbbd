package headrace.bench;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Messages that the broker stores again: delayed, committed or sent back by their consumer.
 *
 * <p>A push consumer counts the second records while the producer still sends. The window lasts
 * from the first send to the last of these records.
 */
final class Waiting {
    private static final int FIRST_LEVEL = 1;

    private final Job job;
    private final Meter meter;
    private final DefaultMQProducer producer;
    private final Arrivals arrivals;
    private final byte[] body;

    private Waiting(Job job, Meter meter, DefaultMQProducer producer) {
        this.job = job;
        this.meter = meter;
        this.producer = producer;
        arrivals = new Arrivals(job, meter, false);
        body = new byte[job.bodyBytes()];
    }

    static void run(Job job, Meter meter, DefaultMQProducer producer) throws Exception {
        Waiting waiting = new Waiting(job, meter, producer);
        switch (job.work()) {
            case "delayed" -> waiting.receiveWhile(waiting::consume, waiting::sendDelayed);
            case "transactions" -> waiting.receiveWhile(waiting::consume, waiting::commit);
            case "send_back" -> waiting.receiveWhile(waiting::sendBack, waiting::sendDelayed);
            default -> throw new IllegalArgumentException(job.work());
        }
    }

    /** The message of a job, with its delay if it has one. */
    static Message message(Job job, byte[] body) {
        Message message = new Message(job.topic(), body);
        if (job.delayLevel() > 0) {
            message.setDelayTimeLevel(job.delayLevel());
        } else if (job.timerMillis() > 0) {
            message.setDelayTimeMs(job.timerMillis());
        }
        return message;
    }

    @FunctionalInterface
    private interface Listen {
        ConsumeConcurrentlyStatus consume(
            List<MessageExt> messages, ConsumeConcurrentlyContext context);
    }

    @FunctionalInterface
    private interface Send {
        void run() throws Exception;
    }

    private void receiveWhile(Listen listen, Send send) throws Exception {
        producer.createTopic("TBW102", job.topic(), Sends.QUEUES, null);
        DefaultMQPushConsumer consumer = Drains.pushConsumer(job);
        consumer.registerMessageListener(listen::consume);
        consumer.start();
        try {
            meter.open();
            send.run();
            arrivals.await();
        } finally {
            consumer.shutdown();
        }
    }

    private ConsumeConcurrentlyStatus consume(
            List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        arrivals.count(messages.size());
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    private ConsumeConcurrentlyStatus sendBack(
            List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        if (messages.get(0).getReconsumeTimes() > 0) {
            return consume(messages, context);
        }
        context.setDelayLevelWhenNextConsume(FIRST_LEVEL);
        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
    }

    private void sendDelayed() throws Exception {
        Semaphore free = new Semaphore(job.inFlight());
        for (int sent = 0; sent < job.messages(); sent++) {
            free.acquire();
            producer.send(message(job, body), new Answer(free));
        }
        free.acquire(job.inFlight());
    }

    private void commit() throws Exception {
        TransactionMQProducer transactions = new TransactionMQProducer("bench_transactions");
        transactions.setNamesrvAddr(job.nameserver());
        transactions.setSendMsgTimeout(10_000);
        transactions.setTransactionListener(new Commit());
        transactions.start();
        try {
            AtomicInteger left = new AtomicInteger(job.messages());
            List<Thread> threads = new ArrayList<>();
            for (int index = 0; index < job.threads(); index++) {
                threads.add(new Thread(() -> commitWhile(left, transactions)));
            }
            threads.forEach(Thread::start);
            for (Thread thread : threads) {
                thread.join();
            }
            arrivals.await();
        } finally {
            transactions.shutdown();
        }
    }

    private void commitWhile(AtomicInteger left, TransactionMQProducer transactions) {
        while (left.getAndDecrement() > 0) {
            try {
                transactions.sendMessageInTransaction(new Message(job.topic(), body), null);
            } catch (Exception failure) {
                meter.failed();
                left.incrementAndGet();
            }
        }
    }

    private static final class Commit implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    private final class Answer implements SendCallback {
        private final Semaphore free;

        Answer(Semaphore free) {
            this.free = free;
        }

        @Override
        public void onSuccess(SendResult result) {
            free.release();
        }

        @Override
        public void onException(Throwable failure) {
            meter.failed();
            free.release();
        }
    }
}
