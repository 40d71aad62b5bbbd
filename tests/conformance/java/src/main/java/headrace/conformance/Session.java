package headrace.conformance;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.Deque;
import java.util.List;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** The clients of one scenario: own topic and group names, shut down together at its end. */
final class Session {
    /**
     * Many JVMs' worth of clients start at once on a small machine, whose host may keep all of it
     * from running for some seconds; the defaults are 3 to 6 s.
     */
    private static final int TIMEOUT_MS = 60_000;
    static final Duration LIMIT = Duration.ofMillis(TIMEOUT_MS);

    /** Signs all requests of a JVM that has credentials; null signs none. */
    static final RPCHook SIGNER = signer();

    final String nameserver;
    final String scope;
    private final Deque<Runnable> shutdowns = new ArrayDeque<>();
    private DefaultMQProducer producer;
    private DefaultMQAdminExt admin;

    Session(String nameserver, String scope) {
        this.nameserver = nameserver;
        this.scope = scope;
    }

    private static RPCHook signer() {
        String user = System.getProperty("headrace.accessKey");
        return user == null
            ? null
            : new AclClientRPCHook(
                new SessionCredentials(user, System.getProperty("headrace.secretKey")));
    }

    void close() {
        while (!shutdowns.isEmpty()) {
            shutdowns.pop().run();
        }
    }

    String topic() {
        return "T_" + scope;
    }

    String group() {
        return "G_" + scope;
    }

    /**
     * A heartbeat that is not answered within 3 s, the default, has the client close the connection
     * under whatever else is on its way; on a machine that is busy with something else that happens.
     */
    private <C extends ClientConfig> C connect(C client) {
        client.setNamesrvAddr(nameserver);
        client.setMqClientApiTimeout(TIMEOUT_MS);
        return client;
    }

    /** Requests about topics and offsets have a limit of their own. */
    private static void letTakeTime(MQClientInstance started) {
        started.getMQAdminImpl().setTimeoutMillis(TIMEOUT_MS);
    }

    /** The session's usual producer; scenarios that need other settings make a newProducer. */
    DefaultMQProducer producer() throws Exception {
        if (producer == null) {
            producer = newProducer("P_" + scope);
            producer.start();
            letTakeTime(producer.getDefaultMQProducerImpl().getMqClientFactory());
        }
        return producer;
    }

    DefaultMQProducer newProducer(String group) {
        DefaultMQProducer made = connect(new DefaultMQProducer(group, SIGNER));
        made.setSendMsgTimeout(TIMEOUT_MS);
        shutdowns.push(made::shutdown);
        return made;
    }

    /** A topic with this many queues on every broker, made by request and known to all. */
    String createTopic(int queues) throws Exception {
        producer().createTopic("TBW102", topic(), queues, null);
        awaitRoute(queues);
        return topic();
    }

    void awaitRoute(int queues) throws Exception {
        Check.eventually(LIMIT, () -> knowsRoute(queues), queues + " queues of " + topic());
    }

    private boolean knowsRoute(int queues) {
        try {
            return producer.fetchPublishMessageQueues(topic()).size() == queues;
        } catch (Exception noRouteYet) {
            return false;
        }
    }

    DefaultLitePullConsumer litePull(String group) {
        DefaultLitePullConsumer made = connect(new DefaultLitePullConsumer(group, SIGNER));
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        made.setAutoCommit(false);
        hurry(made);
        shutdowns.push(made::shutdown);
        return made;
    }

    DefaultMQPushConsumer push(String group) {
        DefaultMQPushConsumer made = connect(new DefaultMQPushConsumer(group, SIGNER));
        // Without it, a shutdown right after the last message may commit one too few.
        made.setAwaitTerminationMillisWhenShutdown(5000);
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        hurry(made);
        shutdowns.push(made::shutdown);
        return made;
    }

    /**
     * A starting client can miss its own first heartbeat (two of its threads contend for a lock and
     * the loser does not try again), and it learns the route of its retry topic, which is born with
     * the group, only by polling; with the defaults it goes without for 30 s.
     */
    private static void hurry(ClientConfig client) {
        client.setHeartbeatBrokerInterval(5000);
        client.setPollNameServerInterval(1000);
    }

    DefaultMQAdminExt admin() throws Exception {
        if (admin == null) {
            admin = connect(new DefaultMQAdminExt(SIGNER, TIMEOUT_MS));
            admin.setInstanceName("admin_" + scope);
            shutdowns.push(admin::shutdown);
            admin.start();
            letTakeTime(admin.getDefaultMQAdminExtImpl().getMqClientInstance());
        }
        return admin;
    }

    /** A started one, shut down with the session if not before. */
    @SuppressWarnings("deprecation")
    DefaultMQPullConsumer pull(String group) throws Exception {
        DefaultMQPullConsumer made = connect(new DefaultMQPullConsumer(group, SIGNER));
        made.setConsumerPullTimeoutMillis(TIMEOUT_MS);
        shutdowns.push(made::shutdown);
        made.start();
        letTakeTime(made.getDefaultMQPullConsumerImpl().getRebalanceImpl().getmQClientFactory());
        return made;
    }

    /** Every message of the topic, by queue and offset, once there are as many as expected. */
    @SuppressWarnings("deprecation")
    List<MessageExt> readAll(String topic, int expected) throws Exception {
        DefaultMQPullConsumer consumer = pull("R_" + scope);
        try {
            List<MessageQueue> queues =
                new ArrayList<>(consumer.fetchSubscribeMessageQueues(topic));
            queues.sort(Comparator.naturalOrder());
            Check.eventuallyAtLeast(expected, () -> total(consumer, queues), topic);
            return pullAll(consumer, queues);
        } finally {
            consumer.shutdown();
        }
    }

    @SuppressWarnings("deprecation")
    private static long total(DefaultMQPullConsumer consumer, List<MessageQueue> queues)
            throws Exception {
        long total = 0;
        for (MessageQueue queue : queues) {
            total += consumer.maxOffset(queue) - consumer.minOffset(queue);
        }
        return total;
    }

    @SuppressWarnings("deprecation")
    static List<MessageExt> pullAll(
            DefaultMQPullConsumer consumer, List<MessageQueue> queues) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        for (MessageQueue queue : queues) {
            found.addAll(pullFrom(consumer, queue, consumer.minOffset(queue)));
        }
        return found;
    }

    /** The messages from an offset to the present end of the queue. */
    @SuppressWarnings("deprecation")
    static List<MessageExt> pullFrom(DefaultMQPullConsumer consumer, MessageQueue queue, long first)
            throws Exception {
        List<MessageExt> found = new ArrayList<>();
        long offset = first;
        long end = consumer.maxOffset(queue);
        while (offset < end) {
            PullResult result = consumer.pull(queue, "*", offset, 32);
            String place = queue + " at " + offset;
            // A static topic's queue may have a gap, behind which it continues.
            if (result.getPullStatus() != PullStatus.NO_MATCHED_MSG) {
                Check.equal(PullStatus.FOUND, result.getPullStatus(), place);
                found.addAll(result.getMsgFoundList());
            }
            Check.that(result.getNextBeginOffset() > offset, place + " stands still");
            offset = result.getNextBeginOffset();
        }
        return found;
    }

    Message message(int index) {
        return message(index, null);
    }

    Message message(int index, String tag) {
        return new Message(topic(), tag, "key-" + index, body(index));
    }

    /** Sends messages first..last-1 and returns their bodies' texts. */
    List<String> send(int first, int last, String tag) throws Exception {
        List<String> texts = new ArrayList<>();
        for (int index = first; index < last; index++) {
            producer().send(message(index, tag));
            texts.add(text(index));
        }
        return texts;
    }

    static byte[] body(int index) {
        return text(index).getBytes(StandardCharsets.UTF_8);
    }

    static String text(int index) {
        return "body-" + index;
    }

    static String text(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static List<String> sortedTexts(List<MessageExt> messages) {
        return messages.stream().map(Session::text).sorted().toList();
    }
}
