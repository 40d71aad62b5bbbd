package headrace.conformance;

import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Looking messages and offsets up, and transactions. */
final class QueryScenarios {
    private QueryScenarios() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("query_by_key", QueryScenarios::byKey);
        scenarios.put("view_by_offset_id", QueryScenarios::byOffsetId);
        scenarios.put("view_by_unique_id", QueryScenarios::byUniqueId);
        scenarios.put("query_offsets", QueryScenarios::offsets);
        scenarios.put("transaction", QueryScenarios::transaction);
    }

    private static String byKey(Session session) throws Exception {
        String topic = session.createTopic(2);
        DefaultMQProducer producer = session.producer();
        producer.send(new Message(topic, "TagA", "order-1 customer-9", Session.body(0)));
        producer.send(new Message(topic, "TagB", "order-2 customer-9", Session.body(1)));
        long now = System.currentTimeMillis();
        Check.eventually(Session.LIMIT, () -> find(producer, topic, "customer-9", now) == 2,
            "two messages of customer-9");
        Check.equal(1, find(producer, topic, "order-2", now), "messages of order-2");
        Check.equal(0, find(producer, topic, "order-3", now), "messages of order-3");
        return "2, 1 and 0 messages";
    }

    private static int find(DefaultMQProducer producer, String topic, String key, long now)
            throws InterruptedException {
        try {
            QueryResult result =
                producer.queryMessage(topic, key, 32, now - 600_000, now + 600_000);
            return result.getMessageList().size();
        } catch (MQClientException notFound) {
            return 0;
        }
    }

    private static String byOffsetId(Session session) throws Exception {
        String topic = session.createTopic(2);
        SendResult sent = session.producer().send(session.message(3, "TagA"));
        Check.eventually(Session.LIMIT,
            () -> Session.text(3).equals(textOf(session, topic, sent.getOffsetMsgId())),
            "message " + sent.getOffsetMsgId());
        return sent.getOffsetMsgId();
    }

    private static String byUniqueId(Session session) throws Exception {
        String topic = session.createTopic(2);
        session.send(0, 5, "TagA");
        SendResult sent = session.producer().send(session.message(5, "TagA"));
        Check.eventually(Session.LIMIT,
            () -> Session.text(5).equals(textOf(session, topic, sent.getMsgId())),
            "message " + sent.getMsgId());
        return sent.getMsgId();
    }

    private static String textOf(Session session, String topic, String id) throws Exception {
        try {
            MessageExt found = session.producer().viewMessage(topic, id);
            return found == null ? null : Session.text(found);
        } catch (MQClientException notIndexedYet) {
            return null;
        }
    }

    @SuppressWarnings("deprecation")
    private static String offsets(Session session) throws Exception {
        String topic = session.createTopic(1);
        session.send(0, 10, null);
        Thread.sleep(20);
        long middle = System.currentTimeMillis();
        Thread.sleep(20);
        session.send(10, 15, null);
        session.readAll(topic, 15);
        DefaultMQProducer producer = session.producer();
        MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(0);
        Check.equal(0L, producer.minOffset(queue), "min offset");
        Check.equal(15L, producer.maxOffset(queue), "max offset");
        Check.equal(10L, producer.searchOffset(queue, middle), "offset by time");
        long earliest = producer.earliestMsgStoreTime(queue);
        Check.that(earliest > middle - 600_000 && earliest <= middle, "earliest %d", earliest);
        return "0, 10, 15";
    }

    /** A committed transaction is delivered, a rolled back one is not; who says neither is asked. */
    private static String transaction(Session session) throws Exception {
        String topic = session.createTopic(1);
        TransactionMQProducer producer = new TransactionMQProducer("PT_" + session.scope, Session.SIGNER);
        producer.setNamesrvAddr(session.nameserver);
        producer.setTransactionListener(new Decider());
        producer.start();
        try {
            for (int index = 0; index < 6; index++) {
                producer.sendMessageInTransaction(session.message(index), STATES[index % 3]);
            }
            List<MessageExt> read = session.readAll(topic, 4);
            Check.equal(List.of("body-0", "body-2", "body-3", "body-5"),
                Session.sortedTexts(read), "committed");
            return "4 of 6 committed, 2 of them when asked";
        } finally {
            producer.shutdown();
        }
    }

    private static final LocalTransactionState[] STATES = {
        LocalTransactionState.COMMIT_MESSAGE,
        LocalTransactionState.ROLLBACK_MESSAGE,
        LocalTransactionState.UNKNOW,
    };

    private static final class Decider implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object state) {
            return (LocalTransactionState) state;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }
}
