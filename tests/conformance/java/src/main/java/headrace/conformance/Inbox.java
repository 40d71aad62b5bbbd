package headrace.conformance;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.message.MessageExt;

/** What the listeners of one or more consumers were handed, in order of arrival. */
final class Inbox {
    private final ConcurrentLinkedQueue<MessageExt> messages = new ConcurrentLinkedQueue<>();

    MessageListenerConcurrently concurrently() {
        return (batch, context) -> {
            messages.addAll(batch);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
    }

    MessageListenerOrderly orderly() {
        return (batch, context) -> {
            messages.addAll(batch);
            return ConsumeOrderlyStatus.SUCCESS;
        };
    }

    int size() {
        return messages.size();
    }

    List<MessageExt> all() {
        return new ArrayList<>(messages);
    }

    void await(int count) throws Exception {
        Check.eventuallyAtLeast(count, this::size, "messages handed to the listener");
    }

    /** Exactly these bodies: each once, whatever the order. */
    void awaitExactly(List<String> expected) throws Exception {
        await(expected.size());
        Check.equal(expected.stream().sorted().toList(), Session.sortedTexts(all()), "bodies");
    }

    /** At least these bodies: a rebalance may hand out some a second time. */
    void awaitAll(List<String> expected) throws Exception {
        Check.eventually(Session.LIMIT,
            () -> Session.sortedTexts(all()).containsAll(expected), expected.size() + " bodies");
    }

    /** Queue offsets in order of arrival, by queue. */
    Map<Integer, List<Long>> offsetsByQueue() {
        Map<Integer, List<Long>> offsets = new TreeMap<>();
        for (MessageExt message : messages) {
            offsets.computeIfAbsent(message.getQueueId(), queue -> new ArrayList<>())
                .add(message.getQueueOffset());
        }
        return offsets;
    }
}
