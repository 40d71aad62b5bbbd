package org.apache.rocketmq.test.base;

import java.util.AbstractList;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.consumer.MQPushConsumer;
import org.apache.rocketmq.client.producer.MQProducer;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.common.attribute.CQType;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.test.client.rmq.RMQAsyncSendProducer;
import org.apache.rocketmq.test.client.rmq.RMQNormalConsumer;
import org.apache.rocketmq.test.client.rmq.RMQNormalProducer;
import org.apache.rocketmq.test.client.rmq.RMQTransactionalProducer;
import org.apache.rocketmq.test.clientinterface.AbstractMQProducer;
import org.apache.rocketmq.test.clientinterface.MQConsumer;
import org.apache.rocketmq.test.factory.ConsumerFactory;
import org.apache.rocketmq.test.listener.AbstractListener;
import org.apache.rocketmq.test.util.MQAdminTestUtils;
import org.apache.rocketmq.test.util.MQRandomUtils;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Base of the tests: what they need of the cluster that runs already, and their clients.
 *
 * <p>Stands on the class path before the class of the same name that starts brokers of its own.
 * Classes run side by side, so each thread keeps the clients that it made.
 */
public class BaseConf {
    public static final String NAMESRV_ADDR = System.getProperty("headrace.nameserver");

    protected static final String CLUSTER_NAME = "DefaultCluster";
    protected static final String BROKER1_NAME = "broker-a";
    protected static final String BROKER2_NAME = "broker-b";
    protected static final String BROKER3_NAME = "broker-c";
    protected static final BrokerController brokerController1 = controller(0);
    protected static final BrokerController brokerController2 = controller(1);
    protected static final BrokerController brokerController3 = controller(2);

    private static final Map<String, BrokerController> BROKERS = Map.of(
        BROKER1_NAME, brokerController1,
        BROKER2_NAME, brokerController2,
        BROKER3_NAME, brokerController3);
    private static final long ADMIN_TIMEOUT_MS = 3000;
    private static final ExecutorService CLOSING = Executors.newCachedThreadPool();
    private static final ThreadLocal<List<Object>> CLIENTS =
        ThreadLocal.withInitial(ArrayList::new);

    protected static List<Object> mqClients = new AbstractList<>() {
        @Override
        public void add(int index, Object client) {
            CLIENTS.get().add(index, client);
        }

        @Override
        public Object remove(int index) {
            return CLIENTS.get().remove(index);
        }

        @Override
        public Object get(int index) {
            return CLIENTS.get().get(index);
        }

        @Override
        public int size() {
            return CLIENTS.get().size();
        }
    };

    /** The brokers listen at neighbouring ports. */
    private static BrokerController controller(int number) {
        String[] first = System.getProperty("headrace.broker").split(":");
        return new BrokerController(first[0] + ":" + (Integer.parseInt(first[1]) + number));
    }

    /** The broker of a name; null for other names. */
    static BrokerController broker(String name) {
        return BROKERS.get(name);
    }

    public static String initTopic() {
        return initTopicWithName(MQRandomUtils.getRandomTopic());
    }

    public static String initTopicWithName(String topic) {
        IntegrationTestBase.initTopic(topic, NAMESRV_ADDR, CLUSTER_NAME, CQType.SimpleCQ);
        return topic;
    }

    public static String initConsumerGroup() {
        String group = MQRandomUtils.getRandomConsumerGroup();
        SubscriptionGroupConfig settings = new SubscriptionGroupConfig();
        settings.setGroupName(group);
        MQAdminTestUtils.createSub(NAMESRV_ADDR, CLUSTER_NAME, settings);
        return group;
    }

    public static RMQNormalProducer getProducer(String nameserver, String topic) {
        return kept(new RMQNormalProducer(nameserver, topic));
    }

    public static RMQNormalProducer getProducer(
        String nameserver, String topic, String group, String instance
    ) {
        return kept(new RMQNormalProducer(nameserver, topic, group, instance));
    }

    public static RMQAsyncSendProducer getAsyncProducer(String nameserver, String topic) {
        return kept(new RMQAsyncSendProducer(nameserver, topic));
    }

    public static RMQTransactionalProducer getTransactionalProducer(
        String nameserver, String topic, TransactionListener listener
    ) {
        return kept(new RMQTransactionalProducer(nameserver, topic, false, listener));
    }

    public static RMQNormalConsumer getConsumer(
        String nameserver, String topic, String expression, AbstractListener listener
    ) {
        return getConsumer(nameserver, initConsumerGroup(), topic, expression, listener);
    }

    public static RMQNormalConsumer getConsumer(
        String nameserver, String group, String topic, String expression, AbstractListener listener
    ) {
        return kept(ConsumerFactory.getRMQNormalConsumer(
            nameserver, group, topic, expression, listener));
    }

    public static DefaultMQAdminExt getAdmin(String nameserver) {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(ADMIN_TIMEOUT_MS);
        admin.setNamesrvAddr(nameserver);
        return kept(admin);
    }

    private static <T> T kept(T client) {
        mqClients.add(client);
        return client;
    }

    /** Shuts down this thread's clients, in the background: each may take 3 s. */
    public static void shutdown() {
        for (Object client : CLIENTS.get()) {
            CLOSING.execute(() -> shutdown(client));
        }
        CLIENTS.remove();
    }

    private static void shutdown(Object client) {
        if (client instanceof AbstractMQProducer producer) {
            producer.shutdown();
        } else if (client instanceof MQProducer producer) {
            producer.shutdown();
        } else if (client instanceof MQPushConsumer consumer) {
            consumer.shutdown();
        } else if (client instanceof MQConsumer consumer) {
            consumer.shutdown();
        } else if (client instanceof DefaultMQAdminExt admin) {
            admin.shutdown();
        } else {
            throw new IllegalArgumentException("no client: " + client);
        }
    }
}
