package headrace.conformance;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.stream.LongStream;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/** The push consumer: held pulls, a group's rebalance, ordered queues, broadcast, tags. */
final class PushScenarios {
    private PushScenarios() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("push_concurrently", PushScenarios::concurrently);
        scenarios.put("push_held_pull", PushScenarios::heldPull);
        scenarios.put("push_orderly", PushScenarios::orderly);
        scenarios.put("push_two_members", PushScenarios::twoMembers);
        scenarios.put("push_broadcast", PushScenarios::broadcast);
        scenarios.put("push_tags", PushScenarios::tags);
        scenarios.put("push_retry", PushScenarios::retry);
        scenarios.put("push_delay_level", PushScenarios::delayLevel);
    }

    private static String concurrently(Session session) throws Exception {
        session.createTopic(4);
        Inbox before = new Inbox();
        DefaultMQPushConsumer first = start(session, before.concurrently(), "*");
        before.awaitExactly(session.send(0, 200, null));
        first.shutdown();

        Inbox after = new Inbox();
        List<String> sent = session.send(200, 220, null);
        start(session, after.concurrently(), "*");
        after.awaitExactly(sent);
        return "200, and 20 after a restart from the committed offsets";
    }

    /** A message that comes while a pull is held is handed over at once. */
    private static String heldPull(Session session) throws Exception {
        session.createTopic(1);
        Inbox inbox = new Inbox();
        start(session, inbox.concurrently(), "*");
        session.send(0, 1, null);
        inbox.await(1);
        List<Long> waits = new ArrayList<>();
        for (int index = 1; index <= 5; index++) {
            Thread.sleep(100);
            long sent = System.nanoTime();
            session.send(index, index + 1, null);
            inbox.await(index + 1);
            waits.add((System.nanoTime() - sent) / 1_000_000);
        }
        // A pull that nothing wakes is answered after 15 s; a busy machine may take a second or two.
        Check.that(waits.stream().allMatch(wait -> wait < 5000), "waited %s ms", waits);
        return "waited " + waits + " ms";
    }

    private static String orderly(Session session) throws Exception {
        session.createTopic(4);
        Inbox inbox = new Inbox();
        startOrderly(session, inbox.orderly());
        inbox.awaitExactly(session.send(0, 200, null));
        checkInOrder(inbox);
        return "queue sizes " + inbox.offsetsByQueue().values().stream().map(List::size).toList();
    }

    private static void checkInOrder(Inbox inbox) {
        inbox.offsetsByQueue().forEach((queue, offsets) -> Check.equal(
            LongStream.range(0, offsets.size()).boxed().toList(), offsets, "queue " + queue));
    }

    /** Two members share the queues; when one leaves, the other takes all. */
    private static String twoMembers(Session session) throws Exception {
        session.createTopic(4);
        Inbox left = new Inbox();
        Inbox right = new Inbox();
        DefaultMQPushConsumer leaver = start(session, left.concurrently(), "*");
        start(session, right.concurrently(), "*");
        int[] sent = {0};
        Check.eventually(Session.LIMIT, () -> {
            session.send(sent[0], sent[0] += 8, null);
            Thread.sleep(50);
            return left.size() > 0 && right.size() > 0;
        }, "both members get messages");
        leaver.shutdown();
        List<String> afterwards = session.send(sent[0], sent[0] + 40, null);
        right.awaitAll(afterwards);
        return "left had " + left.size() + ", then right took all 4 queues";
    }

    private static String broadcast(Session session) throws Exception {
        session.createTopic(2);
        Inbox left = new Inbox();
        Inbox right = new Inbox();
        for (Inbox inbox : List.of(left, right)) {
            DefaultMQPushConsumer consumer = session.push(session.group());
            consumer.setMessageModel(MessageModel.BROADCASTING);
            // A broadcasting consumer keeps the default instance name, so two would clash.
            consumer.setInstanceName(session.scope + System.nanoTime());
            consumer.subscribe(session.topic(), "*");
            consumer.registerMessageListener(inbox.concurrently());
            consumer.start();
        }
        List<String> sent = session.send(0, 50, null);
        left.awaitExactly(sent);
        right.awaitExactly(sent);
        return "50 messages each";
    }

    private static String tags(Session session) throws Exception {
        session.createTopic(2);
        Inbox inbox = new Inbox();
        start(session, inbox.concurrently(), "TagA || TagC");
        List<String> wanted = new ArrayList<>();
        for (int index = 0; index < 60; index += 3) {
            session.send(index, index + 1, "TagB");
            wanted.addAll(session.send(index + 1, index + 2, "TagA"));
            wanted.addAll(session.send(index + 2, index + 3, "TagC"));
        }
        inbox.awaitExactly(wanted);
        return wanted.size() + " of 60";
    }

    /** A listener that fails sends the message back; it returns by the group's retry topic. */
    private static String retry(Session session) throws Exception {
        session.createTopic(1);
        Inbox inbox = new Inbox();
        start(session, (batch, context) -> {
            if (batch.get(0).getReconsumeTimes() == 0) {
                context.setDelayLevelWhenNextConsume(1);
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return inbox.concurrently().consumeMessage(batch, context);
        }, "*");
        session.send(0, 1, null);
        inbox.await(1);
        MessageExt again = inbox.all().get(0);
        Check.equal(1, again.getReconsumeTimes(), "reconsume times");
        Check.equal(session.topic(), again.getTopic(), "topic");
        return "reconsumed once";
    }

    private static String delayLevel(Session session) throws Exception {
        session.createTopic(1);
        Inbox inbox = new Inbox();
        start(session, inbox.concurrently(), "*");
        Message message = session.message(0);
        message.setDelayTimeLevel(1);
        session.producer().send(message);
        inbox.await(1);
        MessageExt late = inbox.all().get(0);
        long delay = late.getStoreTimestamp() - late.getBornTimestamp();
        Check.that(delay >= 950, "delivered after %d ms", delay);
        return "delivered after " + delay + " ms";
    }

    private static DefaultMQPushConsumer start(
            Session session, MessageListenerConcurrently listener, String tags) throws Exception {
        DefaultMQPushConsumer consumer = session.push(session.group());
        consumer.subscribe(session.topic(), tags);
        consumer.registerMessageListener(listener);
        consumer.start();
        return consumer;
    }

    private static void startOrderly(Session session, MessageListenerOrderly listener)
            throws Exception {
        DefaultMQPushConsumer consumer = session.push(session.group());
        consumer.subscribe(session.topic(), "*");
        consumer.registerMessageListener(listener);
        consumer.start();
    }
}
