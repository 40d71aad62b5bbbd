package headrace.conformance;

import java.io.FileOutputStream;
import java.io.IOException;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * The official producer and push consumer, while the queues of a topic move.
 *
 * <p>{@code produce NAMESERVER TOPIC FILE SECONDS RATE} writes a line "BODY QUEUE OFFSET" for each
 * acknowledgement, and prints the number of failed sends. {@code consume NAMESERVER TOPIC FILE}
 * writes such a line for each message before it is consumed, until it is killed. Both have the
 * client's defaults.
 *
 * <p>{@code keyed NAMESERVER TOPIC FILE GROUP POLL_MS KEYS PAUSE_MS} sends the messages
 * "KEY-NUMBER" of each key to one queue, one after the other, each until it is acknowledged; it
 * writes such lines as well, and ends with its input. {@code consume} takes GROUP and POLL_MS, too:
 * the pause between looks at routes.
 */
final class StaticLoad {
    private StaticLoad() {}

    public static void main(String[] arguments) throws Exception {
        switch (arguments[0]) {
            case "produce" -> produce(arguments);
            case "keyed" -> keyed(arguments);
            default -> consume(arguments);
        }
    }

    private static void produce(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("static_producer");
        producer.setNamesrvAddr(arguments[1]);
        producer.start();
        Map<String, SendResult> acknowledged = new ConcurrentHashMap<>();
        AtomicInteger failed = new AtomicInteger();
        ExecutorService pool = Executors.newFixedThreadPool(16);
        long count = Long.parseLong(arguments[4]) * Long.parseLong(arguments[5]);
        long began = System.nanoTime();
        for (long number = 0; number < count; number++) {
            long due = began + number * 1_000_000_000L / Long.parseLong(arguments[5]);
            TimeUnit.NANOSECONDS.sleep(due - System.nanoTime());
            String body = Long.toString(number);
            pool.submit(() -> {
                try {
                    byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
                    acknowledged.put(body, producer.send(new Message(arguments[2], bytes)));
                } catch (Exception error) {
                    failed.incrementAndGet();
                    System.err.println(error);
                }
            });
        }
        pool.shutdown();
        pool.awaitTermination(60, TimeUnit.SECONDS);
        try (PrintWriter file = new PrintWriter(arguments[3])) {
            acknowledged.forEach((body, sent) -> file.println(
                    body + " " + sent.getMessageQueue().getQueueId() + " " + sent.getQueueOffset()));
        }
        System.out.println("failed " + failed);
        System.exit(0);
    }

    private static void keyed(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(arguments[4]);
        producer.setNamesrvAddr(arguments[1]);
        producer.setPollNameServerInterval(Integer.parseInt(arguments[5]));
        producer.start();
        AtomicBoolean isStopped = new AtomicBoolean();
        int keys = Integer.parseInt(arguments[6]);
        ExecutorService pool = Executors.newFixedThreadPool(keys);
        try (FileOutputStream file = new FileOutputStream(arguments[3])) {
            for (int key = 0; key < keys; key++) {
                int ours = key;
                pool.submit(() -> {
                    for (int number = 0; !isStopped.get(); number++) {
                        String body = ours + "-" + number;
                        SendResult sent = sendUntilAcknowledged(producer, arguments[2], ours, body);
                        int queue = sent.getMessageQueue().getQueueId();
                        String line = body + " " + queue + " " + sent.getQueueOffset() + "\n";
                        file.write(line.getBytes(StandardCharsets.UTF_8));
                        Thread.sleep(Long.parseLong(arguments[7]));
                    }
                    return null;
                });
            }
            System.in.read();
            isStopped.set(true);
            pool.shutdown();
            pool.awaitTermination(60, TimeUnit.SECONDS);
        }
        System.exit(0);
    }

    private static SendResult sendUntilAcknowledged(
            DefaultMQProducer producer, String topic, int key, String body)
            throws InterruptedException {
        Message message = new Message(topic, body.getBytes(StandardCharsets.UTF_8));
        while (true) {
            try {
                return producer.send(
                        message, (queues, one, none) -> queues.get(key % queues.size()), null);
            } catch (InterruptedException error) {
                throw error;
            } catch (Exception error) {
                System.err.println(body + ": " + error);
                Thread.sleep(50);
            }
        }
    }

    private static void consume(String[] arguments) throws Exception {
        FileOutputStream file = new FileOutputStream(arguments[3], true);
        boolean isDefault = arguments.length == 4;
        DefaultMQPushConsumer consumer =
                new DefaultMQPushConsumer(isDefault ? "static_consumer" : arguments[4]);
        consumer.setNamesrvAddr(arguments[1]);
        if (!isDefault) {
            consumer.setPollNameServerInterval(Integer.parseInt(arguments[5]));
        }
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(arguments[2], "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            StringBuilder lines = new StringBuilder();
            for (MessageExt message : messages) {
                lines.append(new String(message.getBody(), StandardCharsets.UTF_8))
                        .append(' ').append(message.getQueueId())
                        .append(' ').append(message.getQueueOffset()).append('\n');
            }
            try {
                file.write(lines.toString().getBytes(StandardCharsets.UTF_8));
            } catch (IOException error) {
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Thread.sleep(Long.MAX_VALUE);
    }
}
