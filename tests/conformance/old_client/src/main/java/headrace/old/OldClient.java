package headrace.old;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * The everyday work of a Java client, in the words that all versions from 4.3 on understand.
 *
 * <p>Arguments: nameserver, and a prefix of topics and groups. Prints "ok STEP" for each step, or
 * "failed STEP: reason".
 */
public final class OldClient {
    private static final long LIMIT_S = 60;

    private final String nameserver;
    private final String prefix;
    private final DefaultMQProducer producer;

    private OldClient(String nameserver, String prefix) throws Exception {
        this.nameserver = nameserver;
        this.prefix = prefix;
        producer = new DefaultMQProducer(prefix + "-producers");
        producer.setNamesrvAddr(nameserver);
        producer.setSendMsgTimeout(30_000);
        producer.start();
    }

    interface Step {
        void run() throws Exception;
    }

    public static void main(String[] args) throws Exception {
        OldClient client = new OldClient(args[0], args[1]);
        client.step("send_sync", client::sendSync);
        client.step("send_async", client::sendAsync);
        client.step("send_oneway", client::sendOneway);
        client.step("send_batch", client::sendBatch);
        client.step("send_to_queue", client::sendToQueue);
        client.step("push_tags", client::pushTags);
        client.step("push_orderly", client::pushOrderly);
        client.step("push_broadcast", client::pushBroadcast);
        client.step("push_retry", client::pushRetry);
        client.step("delay_level", client::delayLevel);
        client.step("transaction", client::transaction);
        client.step("pull", client::pull);
        client.step("query_by_key", client::queryByKey);
        client.step("view_by_id", client::viewById);
        client.producer.shutdown();
        System.exit(0);
    }

    private void step(String name, Step step) {
        try {
            step.run();
            System.out.println("ok " + name);
        } catch (Throwable error) {
            System.out.println("failed " + name + ": " + error);
        }
    }

    private static void equal(Object expected, Object found) {
        if (!expected.equals(found)) {
            throw new AssertionError("expected " + expected + ", found " + found);
        }
    }

    private static Message message(String topic, String tag, String key, String body) {
        return new Message(topic, tag, key, body.getBytes(StandardCharsets.UTF_8));
    }

    private static String body(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    private static Set<String> names(String start, int count) {
        Set<String> names = new TreeSet<>();
        for (int i = 0; i < count; i++) {
            names.add(start + i);
        }
        return names;
    }

    private void send(String topic, String tag, Collection<String> bodies) throws Exception {
        for (String body : bodies) {
            equal(SendStatus.SEND_OK, producer.send(message(topic, tag, "key-" + body, body)).getSendStatus());
        }
    }

    private DefaultMQPushConsumer consumer(String group, String topic, String tags) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(prefix + group);
        consumer.setNamesrvAddr(nameserver);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, tags);
        return consumer;
    }

    private static void await(CountDownLatch done, Object soFar) throws Exception {
        if (!done.await(LIMIT_S, TimeUnit.SECONDS)) {
            throw new AssertionError("got only " + soFar);
        }
    }

    /** Runs a consumer until it has seen the wanted bodies, and returns all that it saw. */
    private static Set<String> consumeAll(DefaultMQPushConsumer consumer, Set<String> wanted) throws Exception {
        Set<String> seen = new ConcurrentSkipListSet<>();
        CountDownLatch done = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(each -> seen.add(body(each)));
            if (seen.containsAll(wanted)) {
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        try {
            await(done, seen);
        } finally {
            consumer.shutdown();
        }
        return seen;
    }

    private void sendSync() throws Exception {
        send(prefix + "-sync", "a", names("sync-", 10));
    }

    private void sendAsync() throws Exception {
        CountDownLatch done = new CountDownLatch(10);
        for (String name : names("async-", 10)) {
            producer.send(message(prefix + "-async", "a", "k", name), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    done.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    System.err.println(error);
                }
            });
        }
        await(done, done);
    }

    private void sendOneway() throws Exception {
        String topic = prefix + "-oneway";
        producer.sendOneway(message(topic, "a", "k", "oneway"));
        equal(Set.of("oneway"), consumeAll(consumer("-oneway", topic, "*"), Set.of("oneway")));
    }

    private void sendBatch() throws Exception {
        String topic = prefix + "-batch";
        List<Message> batch = new ArrayList<>();
        names("batch-", 20).forEach(name -> batch.add(message(topic, "a", "k" + name, name)));
        equal(SendStatus.SEND_OK, producer.send(batch).getSendStatus());
        equal(names("batch-", 20), consumeAll(consumer("-batch", topic, "*"), names("batch-", 20)));
    }

    private void sendToQueue() throws Exception {
        String topic = prefix + "-sync";
        List<MessageQueue> queues = producer.fetchPublishMessageQueues(topic);
        MessageQueue queue = queues.get(queues.size() - 1);
        SendResult result = producer.send(message(topic, "chosen", "k", "chosen"), queue);
        equal(queue, result.getMessageQueue());
    }

    private void pushTags() throws Exception {
        String topic = prefix + "-tags";
        send(topic, "wanted", names("wanted-", 10));
        send(topic, "other", names("other-", 10));
        equal(names("wanted-", 10), consumeAll(consumer("-tags", topic, "wanted || none"), names("wanted-", 10)));
    }

    private void pushOrderly() throws Exception {
        String topic = prefix + "-orderly";
        for (int i = 0; i < 30; i++) {
            producer.send(message(topic, "a", "k", "" + i), (queues, each, key) -> queues.get(0), 0);
        }
        List<Integer> seen = Collections.synchronizedList(new ArrayList<>());
        CountDownLatch done = new CountDownLatch(30);
        DefaultMQPushConsumer consumer = consumer("-orderly", topic, "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            messages.forEach(each -> seen.add(Integer.valueOf(body(each))));
            messages.forEach(each -> done.countDown());
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        await(done, seen);
        consumer.shutdown();
        List<Integer> sorted = new ArrayList<>(seen);
        Collections.sort(sorted);
        equal(sorted, new ArrayList<>(seen));
    }

    private void pushBroadcast() throws Exception {
        String topic = prefix + "-broadcast";
        send(topic, "a", names("cast-", 5));
        DefaultMQPushConsumer consumer = consumer("-broadcast", topic, "*");
        // Version 5 moved MessageModel to another package, so it can't be named: 0 is BROADCASTING.
        consumer.setMessageModel(consumer.getMessageModel().getDeclaringClass().getEnumConstants()[0]);
        equal(names("cast-", 5), consumeAll(consumer, names("cast-", 5)));
    }

    private void pushRetry() throws Exception {
        String topic = prefix + "-retry";
        send(topic, "a", names("retry-", 1));
        CountDownLatch again = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = consumer("-retry", topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            if (messages.get(0).getReconsumeTimes() > 0) {
                again.countDown();
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        await(again, "no second delivery");
        consumer.shutdown();
    }

    private void delayLevel() throws Exception {
        String topic = prefix + "-delay";
        Message message = message(topic, "a", "k", "late");
        message.setDelayTimeLevel(1);
        producer.send(message);
        equal(Set.of("late"), consumeAll(consumer("-delay", topic, "*"), Set.of("late")));
    }

    private void transaction() throws Exception {
        String topic = prefix + "-transaction";
        TransactionMQProducer transactional = new TransactionMQProducer(prefix + "-transactions");
        transactional.setNamesrvAddr(nameserver);
        transactional.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object wanted) {
                return (LocalTransactionState) wanted;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        transactional.start();
        for (LocalTransactionState state : LocalTransactionState.values()) {
            transactional.sendMessageInTransaction(message(topic, "a", "k", state.name()), state);
        }
        Set<String> committed = new TreeSet<>(Set.of("COMMIT_MESSAGE", "UNKNOW"));
        equal(committed, new TreeSet<>(consumeAll(consumer("-transaction", topic, "*"), committed)));
        transactional.shutdown();
    }

    private void pull() throws Exception {
        String topic = prefix + "-sync";
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(prefix + "-pull");
        consumer.setNamesrvAddr(nameserver);
        consumer.start();
        Set<String> seen = new TreeSet<>();
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
            long end = consumer.maxOffset(queue);
            for (long offset = consumer.minOffset(queue); offset < end;) {
                PullResult result = consumer.pull(queue, "*", offset, 32);
                result.getMsgFoundList().forEach(each -> seen.add(body(each)));
                offset = result.getNextBeginOffset();
            }
            consumer.updateConsumeOffset(queue, end);
        }
        consumer.shutdown();
        seen.remove("chosen");
        equal(names("sync-", 10), seen);
    }

    private void queryByKey() throws Exception {
        String topic = prefix + "-sync";
        long now = System.currentTimeMillis();
        QueryResult found = producer.queryMessage(topic, "key-sync-3", 10, now - 3_600_000, now + 60_000);
        equal("sync-3", body(found.getMessageList().get(0)));
    }

    private void viewById() throws Exception {
        String topic = prefix + "-sync";
        SendResult sent = producer.send(message(topic, "viewed", "k", "viewed"));
        equal("viewed", body(producer.viewMessage(topic, sent.getMsgId())));
    }
}
