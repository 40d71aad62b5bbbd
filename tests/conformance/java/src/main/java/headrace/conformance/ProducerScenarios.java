package headrace.conformance;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.remoting.protocol.ResponseCode;

/** What a producer sends, what it is answered, and what is stored. */
final class ProducerScenarios {
    private ProducerScenarios() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("producer_sync", ProducerScenarios::sync);
        scenarios.put("producer_async", ProducerScenarios::async);
        scenarios.put("producer_one_way", ProducerScenarios::oneWay);
        scenarios.put("producer_batch", ProducerScenarios::batch);
        scenarios.put("producer_tags_keys_properties", ProducerScenarios::properties);
        scenarios.put("producer_compressed_body", ProducerScenarios::compressed);
        scenarios.put("producer_big_body", ProducerScenarios::big);
        scenarios.put("producer_to_chosen_queue", ProducerScenarios::chosenQueue);
        scenarios.put("producer_auto_created_topic", ProducerScenarios::autoCreated);
        scenarios.put("producer_refused", ProducerScenarios::refused);
    }

    private static String sync(Session session) throws Exception {
        session.createTopic(4);
        Map<Integer, Long> next = new HashMap<>();
        for (int index = 0; index < 40; index++) {
            SendResult result = session.producer().send(session.message(index));
            Check.equal(SendStatus.SEND_OK, result.getSendStatus(), "status");
            Check.equal("DefaultRegion", result.getRegionId(), "region");
            Check.equal(32, result.getOffsetMsgId().length(), "offset message id's length");
            int queue = result.getMessageQueue().getQueueId();
            Check.equal(next.getOrDefault(queue, 0L), result.getQueueOffset(), "queue offset");
            next.put(queue, result.getQueueOffset() + 1);
        }
        Check.equal(4, next.size(), "queues used");
        Check.equal(40, session.readAll(session.topic(), 40).size(), "messages read");
        return "40 messages, queue offsets " + next;
    }

    private static String async(Session session) throws Exception {
        session.createTopic(4);
        int count = 500;
        CountDownLatch done = new CountDownLatch(count);
        ConcurrentLinkedQueue<Throwable> failures = new ConcurrentLinkedQueue<>();
        ConcurrentLinkedQueue<String> places = new ConcurrentLinkedQueue<>();
        for (int index = 0; index < count; index++) {
            session.producer().send(session.message(index), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    places.add(result.getMessageQueue() + "@" + result.getQueueOffset());
                    done.countDown();
                }

                @Override
                public void onException(Throwable failure) {
                    failures.add(failure);
                    done.countDown();
                }
            });
        }
        boolean isDone = done.await(Session.LIMIT.toSeconds(), TimeUnit.SECONDS);
        Check.that(isDone, "%d callbacks missing", done.getCount());
        Check.that(failures.isEmpty(), "failed: %s", failures.peek());
        Check.equal((long) count, places.stream().distinct().count(), "different places");
        Check.equal(count, session.readAll(session.topic(), count).size(), "messages read");
        return count + " callbacks";
    }

    private static String oneWay(Session session) throws Exception {
        session.createTopic(4);
        List<String> expected = new ArrayList<>();
        for (int index = 0; index < 100; index++) {
            session.producer().sendOneway(session.message(index));
            expected.add(Session.text(index));
        }
        List<MessageExt> read = session.readAll(session.topic(), expected.size());
        Check.equal(expected.stream().sorted().toList(), Session.sortedTexts(read), "bodies");
        return read.size() + " messages";
    }

    private static String batch(Session session) throws Exception {
        session.createTopic(1);
        List<Message> messages = new ArrayList<>();
        for (int index = 0; index < 100; index++) {
            messages.add(session.message(index, "Tag" + index % 3));
        }
        SendResult result = session.producer().send(messages);
        Check.equal(SendStatus.SEND_OK, result.getSendStatus(), "status");
        Check.equal(100, result.getMsgId().split(",").length, "unique ids");
        Check.equal(100, result.getOffsetMsgId().split(",").length, "offset ids");
        Check.equal(0L, result.getQueueOffset(), "queue offset of the first");
        List<MessageExt> read = session.readAll(session.topic(), 100);
        for (int index = 0; index < 100; index++) {
            MessageExt message = read.get(index);
            Check.equal((long) index, message.getQueueOffset(), "queue offset");
            Check.equal(Session.text(index), Session.text(message), "body");
            Check.equal("Tag" + index % 3, message.getTags(), "tag");
            Check.equal("key-" + index, message.getKeys(), "key");
        }
        SendResult second = session.producer().send(messages);
        Check.equal(100L, second.getQueueOffset(), "queue offset of the second batch");
        return "2 batches of 100";
    }

    private static String properties(Session session) throws Exception {
        session.createTopic(1);
        Message message = new Message(session.topic(), "Tag-é", "k1 k2", Session.body(7));
        message.setFlag(-7);
        message.putUserProperty("город", "Zürich 東京 \uD83D\uDE80");
        message.putUserProperty("quoted", "\"a\\b\"\t\u0003");
        SendResult result = session.producer().send(message);
        MessageExt read = session.readAll(session.topic(), 1).get(0);
        Check.equal("Tag-é", read.getTags(), "tag");
        Check.equal("k1 k2", read.getKeys(), "keys");
        Check.equal(-7, read.getFlag(), "flag");
        Check.equal("Zürich 東京 \uD83D\uDE80", read.getUserProperty("город"), "property");
        Check.equal("\"a\\b\"\t\u0003", read.getUserProperty("quoted"), "property with controls");
        Check.equal(MessageClientIDSetter.getUniqID(message), result.getMsgId(), "unique id");
        Check.equal(result.getMsgId(), read.getMsgId(), "unique id read");
        Check.equal("DefaultCluster", read.getProperty("CLUSTER"), "CLUSTER, added by the broker");
        Check.that(read.getStoreTimestamp() >= read.getBornTimestamp() - 1000, "store time");
        return "properties " + read.getProperties().keySet();
    }

    private static String compressed(Session session) throws Exception {
        session.createTopic(1);
        byte[] body = "The quick brown fox. ".repeat(50_000).getBytes(StandardCharsets.UTF_8);
        List<CompressionType> types =
            List.of(CompressionType.ZLIB, CompressionType.LZ4, CompressionType.ZSTD);
        for (CompressionType type : types) {
            DefaultMQProducer producer = session.newProducer("P_" + session.scope + type);
            producer.setCompressType(type);
            producer.start();
            producer.send(new Message(session.topic(), body));
        }
        List<MessageExt> read = session.readAll(session.topic(), types.size());
        for (int index = 0; index < types.size(); index++) {
            MessageExt message = read.get(index);
            Check.equal(types.get(index).getCompressionFlag(),
                message.getSysFlag() & MessageSysFlag.COMPRESSION_TYPE_COMPARATOR, "type bits");
            Check.that(message.getStoreSize() < body.length / 10, "stored as it was");
            Check.that(Arrays.equals(body, message.getBody()), "body differs");
        }
        return body.length + " bytes by " + types;
    }

    private static String big(Session session) throws Exception {
        session.createTopic(1);
        byte[] body = new byte[3_900_000];
        new Random(1).nextBytes(body);
        DefaultMQProducer producer = session.newProducer("P_" + session.scope + "_plain");
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        producer.send(new Message(session.topic(), body));
        MessageExt read = session.readAll(session.topic(), 1).get(0);
        Check.that(Arrays.equals(body, read.getBody()), "body differs");
        return body.length + " random bytes";
    }

    private static String chosenQueue(Session session) throws Exception {
        session.createTopic(4);
        for (int index = 0; index < 20; index++) {
            SendResult result = session.producer().send(session.message(index),
                (queues, message, key) -> queues.get((Integer) key % queues.size()), index);
            Check.equal(index % 4, result.getMessageQueue().getQueueId(), "queue");
            Check.equal((long) index / 4, result.getQueueOffset(), "queue offset");
        }
        for (MessageExt message : session.readAll(session.topic(), 20)) {
            Check.equal(Session.text(message.getQueueId() + 4 * (int) message.getQueueOffset()),
                Session.text(message), "body");
        }
        return "20 messages by a selector";
    }

    private static String autoCreated(Session session) throws Exception {
        DefaultMQProducer producer = session.producer();
        SendResult first = producer.send(session.message(0));
        Check.equal(SendStatus.SEND_OK, first.getSendStatus(), "status");
        // The producer's own default; the broker tells the nameserver without waiting for it.
        session.awaitRoute(4);
        Check.equal(1, session.readAll(session.topic(), 1).size(), "messages");
        return "4 queues";
    }

    private static String refused(Session session) throws Exception {
        session.createTopic(1);
        MessageQueue real = session.producer().fetchPublishMessageQueues(session.topic()).get(0);
        MessageQueue noQueue = new MessageQueue(session.topic(), real.getBrokerName(), 99);
        DefaultMQProducer producer = session.newProducer("P_" + session.scope + "_other");
        producer.setRetryTimesWhenSendFailed(0);
        producer.setCreateTopicKey("NO_SUCH_TEMPLATE");
        producer.setMaxMessageSize(8 << 20);
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        producer.start();
        Map<String, Integer> codes = new HashMap<>();
        codes.put("queue", codeOf(producer, session.message(0), noQueue));
        codes.put("size", codeOf(producer, new Message(session.topic(), new byte[5 << 20]), real));
        String missing = session.topic() + "_missing";
        codes.put("topic", codeOf(producer, new Message(missing, Session.body(0)),
            new MessageQueue(missing, real.getBrokerName(), 0)));
        Check.equal(ResponseCode.INVALID_PARAMETER, codes.get("queue"), "queue 99 of 1");
        Check.equal(ResponseCode.MESSAGE_ILLEGAL, codes.get("size"), "5 MiB");
        Check.equal(ResponseCode.TOPIC_NOT_EXIST, codes.get("topic"), "missing topic");
        SendResult after = producer.send(session.message(1), real);
        Check.equal(SendStatus.SEND_OK, after.getSendStatus(), "a good send afterwards");
        return "codes " + codes;
    }

    private static int codeOf(DefaultMQProducer producer, Message message, MessageQueue queue)
            throws Exception {
        try {
            throw new AssertionError("accepted: " + producer.send(message, queue));
        } catch (MQBrokerException refusal) {
            return refusal.getResponseCode();
        }
    }
}
