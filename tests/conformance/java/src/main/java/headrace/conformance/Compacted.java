package headrace.conformance;

import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.store.kv.MessageFetcher;

/**
 * A compacted topic: values are written by key, and read in three ways.
 *
 * <p>{@code write NAMESERVER TOPIC KEYS FIRST END} sends the messages FIRST to END - 1. {@code read
 * NAMESERVER TOPIC GROUP HOW} returns a line for each message, in order of arrival: queue, offset,
 * key and body. {@code refusals NAMESERVER TOPIC} returns the code of each send without a key.
 * {@code fetch NAMESERVER TOPIC BROKER QUEUE END} returns such lines for a queue as a slave pulls it.
 */
@SuppressWarnings("deprecation")
final class Compacted {
    private static final int SENDERS = 32;
    private static final int BODY_BYTES = 1000;
    private static final long SEEK_AGAIN_NS = Duration.ofSeconds(4).toNanos();
    private static final AtomicInteger COUNT = new AtomicInteger();
    private static final ExecutorService CLOSING = Executors.newCachedThreadPool();

    private final Session session;
    private final String topic;

    private Compacted(Session session, String topic) {
        this.session = session;
        this.topic = topic;
    }

    static String run(List<String> words) throws Exception {
        Session session = new Session(words.get(1), "compacted" + COUNT.incrementAndGet());
        Compacted compacted = new Compacted(session, words.get(2));
        try {
            return switch (words.get(0)) {
                case "write" -> compacted.write(Integer.parseInt(words.get(3)),
                    Long.parseLong(words.get(4)), Long.parseLong(words.get(5)));
                case "read" -> compacted.read(words.get(3), words.get(4));
                case "refusals" -> compacted.refusals();
                case "fetch" -> compacted.fetch(words.get(3), Integer.parseInt(words.get(4)),
                    Long.parseLong(words.get(5)));
                default -> throw new IllegalArgumentException("no request: " + words);
            };
        } finally {
            // A client's shutdown can take 3 s.
            CLOSING.submit(session::close);
        }
    }

    // -- writing ----------------------------------------------------------------------------------

    /** Each sender has its own keys, so the messages of a key keep their order. */
    private String write(int keys, long first, long end) throws Exception {
        session.producer();
        ExecutorService pool = Executors.newFixedThreadPool(SENDERS);
        try {
            List<Future<Void>> senders = new ArrayList<>();
            for (int sender = 0; sender < SENDERS; sender++) {
                int own = sender;
                senders.add(pool.submit(() -> {
                    for (long number = first; number < end; number++) {
                        if (keyOf(number, keys) % SENDERS == own) {
                            send(number, "key-" + keyOf(number, keys));
                        }
                    }
                    return null;
                }));
            }
            for (Future<Void> sender : senders) {
                sender.get();
            }
        } finally {
            pool.shutdown();
        }
        return "";
    }

    private static long keyOf(long number, int keys) {
        return number * number / 7 % keys;
    }

    /** Every tenth message deletes its key. */
    private void send(long number, String key) throws Exception {
        Message message = new Message(topic, null, key, body(Long.toString(number)));
        if (number % 10 == 9) {
            message.putUserProperty("__DELETE__", "true");
        }
        session.producer().send(message, new SelectMessageQueueByHash(), key);
    }

    private static byte[] body(String text) {
        byte[] filled = " ".repeat(BODY_BYTES).getBytes(StandardCharsets.UTF_8);
        byte[] start = text.getBytes(StandardCharsets.UTF_8);
        System.arraycopy(start, 0, filled, 0, start.length);
        return filled;
    }

    // -- reading ----------------------------------------------------------------------------------

    private String read(String group, String how) throws Exception {
        DefaultMQPullConsumer queries = session.pull("Q_" + session.scope);
        Map<MessageQueue, Long> last = new TreeMap<>(Comparator.naturalOrder());
        for (MessageQueue queue : queries.fetchSubscribeMessageQueues(topic)) {
            last.put(queue, queries.maxOffset(queue) - 1);
        }
        last.values().removeIf(offset -> offset < 0);
        List<MessageExt> messages = switch (how) {
            case "pull" -> pull(queries, last);
            case "seek" -> seek(group, last);
            case "push" -> push(group, last);
            default -> throw new IllegalArgumentException("no way to read: " + how);
        };
        return lines(messages);
    }

    private static String lines(List<MessageExt> messages) {
        StringBuilder lines = new StringBuilder();
        for (MessageExt message : messages) {
            lines.append(String.join("\t", "" + message.getQueueId(), "" + message.getQueueOffset(),
                message.getKeys(), text(message))).append('\n');
        }
        return lines.toString();
    }

    /** The client has null for the body of a delete marker. */
    private static String text(MessageExt message) {
        return message.getBody() == null ? "" : Session.text(message).strip();
    }

    private static List<MessageExt> pull(
            DefaultMQPullConsumer consumer, Map<MessageQueue, Long> last) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        for (MessageQueue queue : last.keySet()) {
            found.addAll(Session.pullFrom(consumer, queue, 0));
        }
        return found;
    }

    /** Without its seeks, the consumer gets nothing; the client can forget one, see FINDINGS.md. */
    private List<MessageExt> seek(String group, Map<MessageQueue, Long> last) throws Exception {
        DefaultLitePullConsumer consumer = session.litePull(group);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        consumer.start();
        consumer.assign(last.keySet());
        List<MessageExt> found = new ArrayList<>();
        long[] seekAt = {System.nanoTime()};
        await(last, () -> {
            if (System.nanoTime() >= seekAt[0]) {
                seekAt[0] += SEEK_AGAIN_NS;
                for (MessageQueue queue : last.keySet()) {
                    if (found.stream().noneMatch(each -> each.getQueueId() == queue.getQueueId())) {
                        consumer.seekToBegin(queue);
                    }
                }
            }
            found.addAll(consumer.poll(100));
            return found;
        });
        return found;
    }

    private List<MessageExt> push(String group, Map<MessageQueue, Long> last) throws Exception {
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = session.push(group);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(inbox.orderly());
        consumer.start();
        await(last, inbox::all);
        // Commits what it has consumed.
        consumer.shutdown();
        return inbox.all();
    }

    /** Until the last message of each queue is there, which no compaction drops. */
    private static void await(
            Map<MessageQueue, Long> last, Callable<List<MessageExt>> found) throws Exception {
        Check.eventually(Session.LIMIT, () -> {
            Map<Integer, Long> reached = new TreeMap<>();
            found.call().forEach(each -> reached.put(each.getQueueId(), each.getQueueOffset()));
            return last.entrySet().stream().allMatch(entry -> entry.getValue().equals(
                reached.get(entry.getKey().getQueueId())));
        }, "the last messages " + last);
    }

    /** What a slave of Apache's broker runs to get an older part of a queue, up to {@code end}. */
    private String fetch(String broker, int queue, long end) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        try (MessageFetcher fetcher = new MessageFetcher()) {
            fetcher.pullMessageFromMaster(topic, queue, end, broker, (offset, response) -> {
                if (offset >= 0) {
                    found.addAll(MessageDecoder.decodes(ByteBuffer.wrap(response.getBody())));
                }
                return true;
            });
        }
        return lines(found);
    }

    // -- sends without a key ----------------------------------------------------------------------

    private String refusals() throws Exception {
        MessageQueue queue = session.producer().fetchPublishMessageQueues(topic).get(0);
        Message keyless = new Message(topic, body("lost"));
        Message blank = new Message(topic, null, " ", body("lost"));
        Message keyed = new Message(topic, null, "kept-away", body("lost"));
        Message delayed = new Message(topic, body("lost"));
        delayed.setDelayTimeLevel(1);
        TransactionMQProducer transactions = new TransactionMQProducer("PT_" + session.scope, Session.SIGNER);
        transactions.setNamesrvAddr(session.nameserver);
        transactions.setTransactionListener(new NoDecision());
        transactions.start();
        Map<String, Callable<Object>> sends = Map.of(
            "single", () -> session.producer().send(keyless, queue),
            "blank", () -> session.producer().send(blank, queue),
            "batch", () -> session.producer().send(List.of(keyed, keyless), queue),
            "delayed", () -> session.producer().send(delayed, queue),
            "half", () -> transactions.sendMessageInTransaction(keyless, null));
        StringBuilder lines = new StringBuilder();
        for (Map.Entry<String, Callable<Object>> send : new TreeMap<>(sends).entrySet()) {
            lines.append(send.getKey()).append(' ').append(outcome(send.getValue())).append('\n');
        }
        CLOSING.submit(transactions::shutdown);
        return lines.toString();
    }

    private static final class NoDecision implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object state) {
            return LocalTransactionState.UNKNOW;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.UNKNOW;
        }
    }

    private static String outcome(Callable<Object> send) throws Exception {
        try {
            return "accepted " + send.call();
        } catch (MQBrokerException refusal) {
            return "" + refusal.getResponseCode();
        } catch (MQClientException failure) {
            if (failure.getCause() instanceof MQBrokerException refusal) {
                return "" + refusal.getResponseCode();
            }
            throw failure;
        }
    }
}
