package headrace.conformance;

import java.io.FileOutputStream;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
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
 * The official producer and push consumer with their defaults, while the queues of a topic move.
 *
 * <p>{@code produce NAMESERVER TOPIC FILE SECONDS RATE} writes a line "BODY QUEUE OFFSET" for each
 * acknowledgement, and prints the number of failed sends. {@code consume NAMESERVER TOPIC FILE}
 * writes such a line for each message before it is consumed, until it is killed.
 */
final class StaticLoad {
    private StaticLoad() {}

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("produce")) {
            produce(arguments);
        } else {
            consume(arguments);
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

    private static void consume(String[] arguments) throws Exception {
        FileOutputStream file = new FileOutputStream(arguments[3], true);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("static_consumer");
        consumer.setNamesrvAddr(arguments[1]);
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
            } catch (java.io.IOException error) {
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Thread.sleep(Long.MAX_VALUE);
    }
}
