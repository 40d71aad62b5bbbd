package headrace.kafka;

import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Kafka's side of tests/bench/share.py: {@code fill ADDRESS TOPIC GROUP MESSAGES BYTES INVISIBLE_MS}
 * makes a topic of one partition and a share group that begins at its start; {@code work ADDRESS
 * TOPIC GROUP CONSUMERS MESSAGES WORK_MS} is that many share consumers, each in its own thread.
 *
 * <p>A line for each message that is done: its number, the attempt, and when it came and was done.
 */
public final class Share {
    private static final FileOutputStream OUT = new FileOutputStream(FileDescriptor.out);

    private final String address;
    private final String topic;
    private final String group;

    private Share(String address, String topic, String group) {
        this.address = address;
        this.topic = topic;
        this.group = group;
    }

    public static void main(String[] arguments) throws Exception {
        Share share = new Share(arguments[1], arguments[2], arguments[3]);
        int count = Integer.parseInt(arguments[4]);
        int size = Integer.parseInt(arguments[5]);
        int millis = Integer.parseInt(arguments[6]);
        switch (arguments[0]) {
            case "fill" -> share.fill(count, size, millis);
            case "work" -> share.work(count, size, millis);
            default -> throw new IllegalArgumentException(arguments[0]);
        }
    }

    // -- fill -------------------------------------------------------------------------------------

    private void fill(int messages, int bodyBytes, int invisibleMillis) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.createTopics(Set.of(new NewTopic(topic, Optional.of(1), Optional.empty())))
                .all().get();
            admin.incrementalAlterConfigs(Map.of(
                new ConfigResource(ConfigResource.Type.GROUP, group),
                List.of(
                    set("share.auto.offset.reset", "earliest"),
                    set("share.record.lock.duration.ms", Integer.toString(invisibleMillis)))))
                .all().get();
        }
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(
                Map.of("bootstrap.servers", address, "acks", "1"),
                new ByteArraySerializer(), new ByteArraySerializer())) {
            for (long number = 0; number < messages; number++) {
                byte[] body = ByteBuffer.allocate(bodyBytes).putLong(number).array();
                producer.send(new ProducerRecord<>(topic, body));
            }
        }
    }

    private static AlterConfigOp set(String name, String value) {
        return new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
    }

    // -- work -------------------------------------------------------------------------------------

    private void work(int consumers, int messagesMax, int workMillis) {
        for (int index = 0; index < consumers; index++) {
            new Thread(() -> consume(messagesMax, workMillis)).start();
        }
    }

    /** The next poll acknowledges what the last one returned. */
    private void consume(int messagesMax, int workMillis) {
        Map<String, Object> settings = Map.of(
            "bootstrap.servers", address,
            "group.id", group,
            "max.poll.records", messagesMax,
            "share.acquire.mode", "record_limit");
        try (KafkaShareConsumer<byte[], byte[]> consumer = new KafkaShareConsumer<>(
                settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (true) {
                Iterable<ConsumerRecord<byte[], byte[]>> records =
                    consumer.poll(Duration.ofSeconds(20));
                long came = System.currentTimeMillis();
                long due = System.nanoTime();
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    due += workMillis * 1_000_000L;
                    for (long left; (left = due - System.nanoTime()) > 0;) {
                        LockSupport.parkNanos(left);
                    }
                    note(record, came);
                }
            }
        } catch (IOException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private static void note(ConsumerRecord<byte[], byte[]> record, long came) throws IOException {
        long number = ByteBuffer.wrap(record.value()).getLong();
        int attempt = record.deliveryCount().orElse((short) 1);
        String line = number + " " + attempt + " " + came + " " + System.currentTimeMillis() + "\n";
        OUT.write(line.getBytes());
    }
}
