package headrace.conformance;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * What a broker has, a line for each message, committed offset and answer of its index, so that
 * two brokers on one store directory can be compared.
 */
@SuppressWarnings("deprecation")
final class Dump {
    /** Added by the client to what it pulls. */
    private static final List<String> CLIENTS = List.of(
        MessageConst.PROPERTY_MIN_OFFSET, MessageConst.PROPERTY_MAX_OFFSET);
    private static final AtomicInteger COUNT = new AtomicInteger();
    private static final ExecutorService CLOSING = Executors.newCachedThreadPool();

    private final StringBuilder lines = new StringBuilder();

    private Dump() {
    }

    static String of(String nameserver, String[] topics, String[] groups) throws Exception {
        // Clients of the same name would be one, though their brokers differ.
        Session session = new Session(nameserver, "dump" + COUNT.incrementAndGet());
        try {
            return new Dump().read(session, topics, groups);
        } finally {
            // A client's shutdown can take 3 s.
            CLOSING.submit(session::close);
        }
    }

    private String read(Session session, String[] topics, String[] groups) throws Exception {
        List<DefaultMQPullConsumer> consumers = new ArrayList<>();
        for (String group : groups) {
            consumers.add(session.pull(group));
        }
        for (String topic : topics) {
            List<MessageQueue> queues =
                new ArrayList<>(consumers.get(0).fetchSubscribeMessageQueues(topic));
            queues.sort(Comparator.naturalOrder());
            List<MessageExt> messages = Session.pullAll(consumers.get(0), queues);
            messages.forEach(message -> print("message", describe(message)));
            for (String key : keysOf(messages)) {
                print("index", topic, key, find(session.admin(), topic, key));
            }
            for (DefaultMQPullConsumer consumer : consumers) {
                printOffsets(consumer, queues);
            }
        }
        return lines.toString();
    }

    private void print(Object... fields) {
        lines.append(String.join("\t", Arrays.stream(fields).map(String::valueOf).toList()))
            .append('\n');
    }

    private static String describe(MessageExt message) {
        Map<String, String> properties = new TreeMap<>(message.getProperties());
        properties.keySet().removeAll(CLIENTS);
        return String.join("\t", message.getTopic(), "" + message.getQueueId(),
            "" + message.getQueueOffset(), "" + message.getCommitLogOffset(),
            "" + message.getStoreSize(), "" + message.getSysFlag(), "" + message.getFlag(),
            "" + message.getBodyCRC(), "" + UtilAll.crc32(message.getBody()),
            "" + message.getBornTimestamp(), message.getBornHostString(),
            "" + message.getStoreTimestamp(), message.getStoreHost().toString(),
            "" + message.getReconsumeTimes(), "" + message.getPreparedTransactionOffset(),
            properties.toString().replaceAll("\\s", "_"));
    }

    private static TreeSet<String> keysOf(List<MessageExt> messages) {
        TreeSet<String> keys = new TreeSet<>();
        for (MessageExt message : messages) {
            if (message.getKeys() != null && keys.size() < 20) {
                keys.addAll(Arrays.asList(message.getKeys().split(" ")));
            }
        }
        keys.remove("");
        return keys;
    }

    private static String find(DefaultMQAdminExt admin, String topic, String key)
            throws Exception {
        try {
            List<Long> places = new ArrayList<>();
            for (MessageExt found : admin.queryMessage(topic, key, 64, 0, Long.MAX_VALUE)
                    .getMessageList()) {
                places.add(found.getCommitLogOffset());
            }
            places.sort(Comparator.naturalOrder());
            return new TreeSet<>(places).toString();
        } catch (MQClientException failure) {
            if (failure.getResponseCode() != ResponseCode.NO_MESSAGE) {
                throw failure;
            }
            return "nothing";
        }
    }

    private void printOffsets(DefaultMQPullConsumer group, List<MessageQueue> queues)
            throws Exception {
        for (MessageQueue queue : queues) {
            print("offset", group.getConsumerGroup(), queue.getTopic(), queue.getQueueId(),
                group.fetchConsumeOffset(queue, true));
        }
    }
}
