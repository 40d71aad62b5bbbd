package headrace.conformance;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.LongStream;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** The lite pull consumer: subscribed to a group's share, or assigned queues by hand. */
final class LitePullScenarios {
    private static final Duration SEEK_AGAIN = Duration.ofSeconds(4);

    private LitePullScenarios() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("lite_pull_subscribe", LitePullScenarios::subscribe);
        scenarios.put("lite_pull_tags", LitePullScenarios::tags);
        scenarios.put("lite_pull_assign_seek", LitePullScenarios::assignAndSeek);
        scenarios.put("lite_pull_offset_for_timestamp", LitePullScenarios::offsetForTimestamp);
    }

    private static String subscribe(Session session) throws Exception {
        session.createTopic(4);
        List<String> first = session.send(0, 60, null);
        DefaultLitePullConsumer consumer = session.litePull(session.group());
        consumer.subscribe(session.topic(), "*");
        consumer.start();
        Check.equal(sorted(first), Session.sortedTexts(poll(consumer, 60)), "bodies");
        commitAndClose(consumer);

        List<String> second = session.send(60, 80, null);
        DefaultLitePullConsumer successor = session.litePull(session.group());
        successor.subscribe(session.topic(), "*");
        successor.start();
        Check.equal(sorted(second), Session.sortedTexts(poll(successor, 20)), "after a restart");
        return "60, and 20 after a restart from the committed offsets";
    }

    private static String tags(Session session) throws Exception {
        session.createTopic(2);
        List<String> wanted = new ArrayList<>();
        for (int index = 0; index < 60; index += 3) {
            wanted.addAll(session.send(index, index + 1, "TagA"));
            session.send(index + 1, index + 2, "TagB");
            wanted.addAll(session.send(index + 2, index + 3, "TagC"));
        }
        DefaultLitePullConsumer consumer = session.litePull(session.group());
        consumer.subscribe(session.topic(), "TagA || TagC");
        consumer.start();
        List<MessageExt> read = poll(consumer, wanted.size());
        Check.equal(sorted(wanted), Session.sortedTexts(read), "bodies");
        return wanted.size() + " of 60";
    }

    private static String assignAndSeek(Session session) throws Exception {
        session.createTopic(1);
        session.send(0, 50, null);
        DefaultLitePullConsumer consumer = session.litePull(session.group());
        consumer.start();
        MessageQueue queue = only(consumer.fetchMessageQueues(session.topic()));
        consumer.assign(List.of(queue));
        pollRange(consumer, () -> consumer.seekToBegin(queue), 0, 50);
        long first = pollRange(consumer, () -> consumer.seek(queue, 30), 30, 50);
        Check.equal(30L, first, "first after seek(30)");
        consumer.seekToEnd(queue);
        session.send(50, 51, null);
        first = pollRange(consumer, () -> { }, 50, 51);
        Check.equal(50L, first, "first after seekToEnd");
        commit(consumer, Set.of(queue));
        Check.equal(51L, consumer.committed(queue), "committed");
        return "seek to 0, 30 and the end; committed 51";
    }

    private static String offsetForTimestamp(Session session) throws Exception {
        session.createTopic(1);
        session.send(0, 10, null);
        Thread.sleep(20);
        long middle = System.currentTimeMillis();
        Thread.sleep(20);
        session.send(10, 20, null);
        session.readAll(session.topic(), 20);
        DefaultLitePullConsumer consumer = session.litePull(session.group());
        consumer.start();
        MessageQueue queue = only(consumer.fetchMessageQueues(session.topic()));
        Check.equal(10L, consumer.offsetForTimestamp(queue, middle), "between the two tens");
        Check.equal(0L, consumer.offsetForTimestamp(queue, 1000L), "long ago");
        Check.equal(20L, consumer.offsetForTimestamp(queue, middle + 3_600_000), "in an hour");
        return "0, 10 and 20";
    }

    /** Polls until this many came, and then once more: nothing else may come. */
    private static List<MessageExt> poll(DefaultLitePullConsumer consumer, int count)
            throws Exception {
        List<MessageExt> found = new ArrayList<>();
        Check.eventually(Session.LIMIT, () -> {
            found.addAll(consumer.poll(100));
            return found.size() >= count;
        }, "poll " + count + " messages");
        found.addAll(consumer.poll(50));
        Check.equal(count, found.size(), "messages polled");
        return found;
    }

    /**
     * Polls until every offset from first to end - 1 came; returns the very first that came.
     *
     * <p>Seeks again when they do not come, since the client can forget a seek: it interrupts the
     * pull before it, which closes the connection if it was about to ask, and the pull that was to
     * begin there fails and goes on from where the one before it was.
     */
    private static long pollRange(
            DefaultLitePullConsumer consumer, Seek seek, long first, long end) throws Exception {
        List<Long> offsets = new ArrayList<>();
        List<Long> wanted = LongStream.range(first, end).boxed().toList();
        long[] seekAt = {System.nanoTime()};
        Check.eventually(Session.LIMIT, () -> {
            if (System.nanoTime() >= seekAt[0]) {
                seek.run();
                seekAt[0] += SEEK_AGAIN.toNanos();
            }
            consumer.poll(100).forEach(message -> offsets.add(message.getQueueOffset()));
            return offsets.containsAll(wanted);
        }, "poll offsets " + first + " to " + (end - 1));
        return offsets.get(0);
    }

    private interface Seek {
        void run() throws Exception;
    }

    private static void commitAndClose(DefaultLitePullConsumer consumer) throws Exception {
        commit(consumer, new HashSet<>(consumer.assignment()));
        consumer.shutdown();
    }

    private static void commit(DefaultLitePullConsumer consumer, Set<MessageQueue> queues) {
        consumer.commit(queues, true);
    }

    private static MessageQueue only(Collection<MessageQueue> queues) {
        Check.equal(1, queues.size(), "queues");
        return queues.iterator().next();
    }

    private static List<String> sorted(List<String> texts) {
        return texts.stream().sorted().toList();
    }
}
