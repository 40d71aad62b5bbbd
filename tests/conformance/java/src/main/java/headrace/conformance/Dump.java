package headrace.conformance;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Prints what a broker has, a line for each message, committed offset and answer of its index, so
 * that two brokers on one store directory can be compared.
 *
 * <p>Arguments: nameserver, topics with commas between, groups with commas between.
 */
@SuppressWarnings("deprecation")
public final class Dump {
    /** Added by the client to what it pulls. */
    private static final List<String> CLIENTS = List.of(
        MessageConst.PROPERTY_MIN_OFFSET, MessageConst.PROPERTY_MAX_OFFSET);

    private Dump() {
    }

    public static void main(String[] args) {
        int status = 0;
        try {
            dump(args);
        } catch (Exception failure) {
            failure.printStackTrace();
            status = 1;
        }
        System.out.flush();
        // Shutting the clients down would take seconds, and they don't let the process end.
        Runtime.getRuntime().halt(status);
    }

    private static void dump(String[] args) throws Exception {
        Session session = new Session(args[0], "dump");
        DefaultMQAdminExt admin = session.admin();
        List<DefaultMQPullConsumer> groups = new ArrayList<>();
        for (String group : args[2].split(",")) {
            groups.add(session.pull(group));
        }
        for (String topic : args[1].split(",")) {
            List<MessageQueue> queues =
                new ArrayList<>(groups.get(0).fetchSubscribeMessageQueues(topic));
            queues.sort(Comparator.naturalOrder());
            List<MessageExt> messages = Session.pullAll(groups.get(0), queues);
            messages.forEach(message -> print("message", describe(message)));
            for (String key : keysOf(messages)) {
                print("index", topic, key, find(admin, topic, key));
            }
            for (DefaultMQPullConsumer group : groups) {
                printOffsets(group, queues);
            }
        }
    }

    private static void print(Object... fields) {
        System.out.println(String.join("\t", Arrays.stream(fields).map(String::valueOf).toList()));
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

    private static void printOffsets(DefaultMQPullConsumer group, List<MessageQueue> queues)
            throws Exception {
        for (MessageQueue queue : queues) {
            print("offset", group.getConsumerGroup(), queue.getTopic(), queue.getQueueId(),
                group.fetchConsumeOffset(queue, true));
        }
    }
}
