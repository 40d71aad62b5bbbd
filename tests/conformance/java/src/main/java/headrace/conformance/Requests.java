package headrace.conformance;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Requests between clients: the official requester, and the official replier. */
final class Requests {
    private static final Map<String, Session> REPLIERS = new HashMap<>();

    private Requests() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("request_reply", Requests::scenario);
    }

    private static String scenario(Session session) throws Exception {
        session.createTopic(2);
        start(session, session.group(), session.topic());
        List<String> replies = new ArrayList<>();
        for (int index = 0; index < 5; index++) {
            replies.add(Session.text(session.producer().request(session.message(index), 30_000)));
        }
        List<String> expected = new ArrayList<>();
        for (int index = 0; index < 5; index++) {
            expected.add("re: " + Session.text(index));
        }
        Check.equal(expected, replies, "replies");
        return replies.toString();
    }

    /** {@code NAMESERVER TOPIC BODY}; returns the body of the reply. */
    static String ask(List<String> words) throws Exception {
        Session session = new Session(words.get(0), "ask_" + System.nanoTime());
        try {
            DefaultMQProducer producer = session.producer();
            byte[] body = words.get(2).getBytes(StandardCharsets.UTF_8);
            return Session.text(producer.request(new Message(words.get(1), body), 30_000));
        } finally {
            session.close();
        }
    }

    /** {@code NAMESERVER GROUP TOPIC}; replies until {@code hush GROUP}. */
    static String serve(List<String> words) throws Exception {
        Session session = new Session(words.get(0), "serve_" + words.get(1));
        REPLIERS.put(words.get(1), session);
        start(session, words.get(1), words.get(2));
        return "";
    }

    static String hush(String group) {
        REPLIERS.remove(group).close();
        return "";
    }

    private static void start(Session session, String group, String topic) throws Exception {
        DefaultMQProducer replier = session.newProducer("R_" + group);
        replier.start();
        DefaultMQPushConsumer consumer = session.push(group);
        consumer.subscribe(topic, "*");
        MessageListenerConcurrently listener = (batch, context) -> {
            for (MessageExt message : batch) {
                answer(replier, message);
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
        consumer.registerMessageListener(listener);
        consumer.start();
    }

    private static void answer(DefaultMQProducer replier, MessageExt message) {
        byte[] body = ("re: " + Session.text(message)).getBytes(StandardCharsets.UTF_8);
        try {
            replier.send(MessageUtil.createReplyMessage(message, body));
        } catch (Exception failure) {
            throw new IllegalStateException(failure);
        }
    }
}
