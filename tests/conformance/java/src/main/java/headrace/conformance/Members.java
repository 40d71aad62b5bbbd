package headrace.conformance;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/** Push consumers that live until they are asked to leave, by client id. */
final class Members {
    private static final Map<String, Members> ALL = new HashMap<>();

    private final Session session;
    private final List<String> bodies = new ArrayList<>();

    private Members(Session session) {
        this.session = session;
    }

    /**
     * {@code NAMESERVER GROUP TOPIC STRATEGY}; broadcasts from the address {@code IP} if there is a
     * fifth word. Returns the client id.
     */
    static String join(List<String> words) throws Exception {
        Session session = new Session(words.get(0), "member" + ALL.size());
        Members member = new Members(session);
        DefaultMQPushConsumer consumer = session.push(words.get(1));
        consumer.setAllocateMessageQueueStrategy(strategy(words.get(3)));
        if (words.size() > 4) {
            consumer.setMessageModel(MessageModel.BROADCASTING);
            consumer.setClientIP(words.get(4));
        }
        consumer.subscribe(words.get(2), "*");
        MessageListenerConcurrently listener = (batch, context) -> {
            synchronized (member.bodies) {
                batch.forEach(message ->
                    member.bodies.add(new String(message.getBody(), StandardCharsets.UTF_8)));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
        consumer.registerMessageListener(listener);
        consumer.start();
        String clientId =
            consumer.getDefaultMQPushConsumerImpl().getmQClientFactory().getClientId();
        ALL.put(clientId, member);
        return clientId;
    }

    private static AllocateMessageQueueStrategy strategy(String name) {
        return switch (name) {
            case "averagely" -> new AllocateMessageQueueAveragely();
            case "averagely_by_circle" -> new AllocateMessageQueueAveragelyByCircle();
            case "consistent_hash" -> new AllocateMessageQueueConsistentHash();
            default -> throw new IllegalArgumentException("no strategy: " + name);
        };
    }

    /** The bodies that a member has received, each on a line. */
    static String received(String clientId) {
        List<String> bodies = ALL.get(clientId).bodies;
        synchronized (bodies) {
            return String.join("\n", bodies);
        }
    }

    static String leave(String clientId) {
        ALL.remove(clientId).session.close();
        return "";
    }
}
