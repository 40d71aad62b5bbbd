package headrace.conformance;

import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.body.ClusterInfo;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * mqadmin's own commands, judged by what they print.
 *
 * <p>They swallow exceptions into System.err.
 */
final class AdminScenarios {
    private AdminScenarios() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("mqadmin_clusterList", AdminScenarios::clusterList);
        scenarios.put("mqadmin_updateTopic", AdminScenarios::updateTopic);
        scenarios.put("mqadmin_topicList", AdminScenarios::topicList);
        scenarios.put("mqadmin_topicRoute", AdminScenarios::topicRoute);
        scenarios.put("mqadmin_topicStatus", AdminScenarios::topicStatus);
        scenarios.put("mqadmin_deleteTopic", AdminScenarios::deleteTopic);
        scenarios.put("mqadmin_consumerProgress", AdminScenarios::consumerProgress);
        scenarios.put("mqadmin_consumerConnection", AdminScenarios::consumerConnection);
        scenarios.put("mqadmin_resetOffsetByTime", AdminScenarios::resetOffsetByTime);
        scenarios.put("mqadmin_queryMsgById", AdminScenarios::queryMsgById);
        scenarios.put("mqadmin_queryMsgByKey", AdminScenarios::queryMsgByKey);
        scenarios.put("mqadmin_updateSubGroup", AdminScenarios::updateSubGroup);
        scenarios.put("mqadmin_brokerStatus", AdminScenarios::brokerStatus);
        scenarios.put("mqadmin_getBrokerConfig", AdminScenarios::getBrokerConfig);
    }

    private static String clusterList(Session session) throws Exception {
        Place place = Place.of(session);
        return expect(run(session, "clusterList"), place.cluster, place.broker, place.address);
    }

    private static String updateTopic(Session session) throws Exception {
        String printed = run(session, "updateTopic", "-c", Place.of(session).cluster,
            "-t", session.topic(), "-r", "6", "-w", "6");
        expect(printed, "create topic to", "success", "readQueueNums=6", "writeQueueNums=6");
        Check.equal(6, session.producer().fetchPublishMessageQueues(session.topic()).size(),
            "queues in the route");
        return firstLine(printed);
    }

    private static String topicList(Session session) throws Exception {
        session.createTopic(1);
        return expect(run(session, "topicList"), session.topic());
    }

    private static String topicRoute(Session session) throws Exception {
        session.createTopic(3);
        Place place = Place.of(session);
        return expect(run(session, "topicRoute", "-t", session.topic()).replaceAll("\\s", ""),
            "\"brokerName\":\"" + place.broker + "\"", place.address,
            "\"readQueueNums\":3", "\"writeQueueNums\":3", "\"perm\":6");
    }

    private static String topicStatus(Session session) throws Exception {
        session.createTopic(1);
        session.send(0, 7, null);
        session.readAll(session.topic(), 7);
        String printed = run(session, "topicStatus", "-t", session.topic());
        String row = expect(line(printed, Place.of(session).broker), " 0 ", " 7 ");
        return row;
    }

    private static String deleteTopic(Session session) throws Exception {
        session.createTopic(1);
        session.send(0, 1, null);
        expect(run(session, "deleteTopic", "-c", Place.of(session).cluster,
            "-t", session.topic()), "from cluster", "from NameServer", "success");
        String list = run(session, "topicList");
        Check.that(!list.contains(session.topic() + System.lineSeparator()), "still listed");
        return "gone";
    }

    private static String consumerProgress(Session session) throws Exception {
        consume(session, 9);
        session.send(9, 12, null);
        session.readAll(session.topic(), 12);
        String printed =
            run(session, "consumerProgress", "-g", session.group(), "-n", session.nameserver);
        expect(line(printed, session.topic()), " 12 ", " 9 ", " 3 ");
        return expect(printed, "Consume Diff Total: 3");
    }

    private static String consumerConnection(Session session) throws Exception {
        session.createTopic(1);
        DefaultMQPushConsumer consumer = startConsumer(session, new Inbox());
        Check.eventually(Session.LIMIT,
            () -> capture(session, "consumerConnection", "-g", session.group())
                .contains(consumer.buildMQClientId()), "the client's id is listed");
        return expect(run(session, "consumerConnection", "-g", session.group()),
            session.topic(), "JAVA", "CONSUME_PASSIVELY", "CLUSTERING",
            "CONSUME_FROM_FIRST_OFFSET");
    }

    private static String resetOffsetByTime(Session session) throws Exception {
        consume(session, 9);
        String printed = run(session, "resetOffsetByTime", "-g", session.group(),
            "-t", session.topic(), "-s", "1000");
        expect(line(printed, Place.of(session).broker), " 0 ");
        Inbox again = new Inbox();
        startConsumer(session, again);
        again.await(9);
        return "9 messages a second time";
    }

    private static String queryMsgById(Session session) throws Exception {
        session.createTopic(1);
        SendResult sent = session.producer().send(session.message(4, "TagA"));
        session.readAll(session.topic(), 1);
        for (String id : List.of(sent.getOffsetMsgId(), sent.getMsgId())) {
            eventuallyPrints(session, List.of("TagA", "key-4", session.topic()),
                "queryMsgById", "-t", session.topic(), "-i", id);
        }
        return "by offset id and by unique id";
    }

    private static String queryMsgByKey(Session session) throws Exception {
        session.createTopic(1);
        SendResult sent = session.producer().send(session.message(4, "TagA"));
        eventuallyPrints(session, List.of(sent.getMsgId()),
            "queryMsgByKey", "-t", session.topic(), "-k", "key-4");
        return sent.getMsgId();
    }

    private static String updateSubGroup(Session session) throws Exception {
        String printed = run(session, "updateSubGroup", "-c", Place.of(session).cluster,
            "-g", session.group(), "-r", "5");
        return expect(printed, "create subscription group to", "success", "retryMaxTimes=5");
    }

    private static String brokerStatus(Session session) throws Exception {
        String printed = run(session, "brokerStatus", "-b", Place.of(session).address);
        expect(printed, "brokerVersionDesc", "bootTimestamp", "putTps", "msgPutTotalTodayNow",
            "getTransferredTps", "dispatchBehindBytes", "commitLogDiskRatio", "runtime");
        return printed.lines().count() + " values";
    }

    private static String getBrokerConfig(Session session) throws Exception {
        Place place = Place.of(session);
        String printed = run(session, "getBrokerConfig", "-b", place.address);
        expect(line(printed, "brokerName "), place.broker);
        expect(printed, "brokerClusterName", "flushDiskType", "storePathRootDir");
        return printed.lines().count() + " settings";
    }

    private static void consume(Session session, int count) throws Exception {
        session.createTopic(1);
        session.send(0, count, null);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = startConsumer(session, inbox);
        inbox.await(count);
        consumer.shutdown();
        MessageQueue queue = session.producer().fetchPublishMessageQueues(session.topic()).get(0);
        DefaultMQAdminExt admin = session.admin();
        Check.eventually(Session.LIMIT, () -> admin.examineConsumeStats(session.group())
            .getOffsetTable().get(queue).getConsumerOffset() == count, count + " committed");
    }

    static DefaultMQPushConsumer startConsumer(Session session, Inbox inbox)
            throws Exception {
        DefaultMQPushConsumer consumer = session.push(session.group());
        consumer.subscribe(session.topic(), "*");
        consumer.registerMessageListener(inbox.concurrently());
        consumer.start();
        return consumer;
    }

    /** The index is built after the append, so the first answers may be empty or an error. */
    private static void eventuallyPrints(Session session, List<String> wanted, String... command)
            throws Exception {
        Check.eventually(Session.LIMIT, () -> {
            String printed = capture(session, command);
            return wanted.stream().allMatch(printed::contains);
        }, String.join(" ", command) + " prints " + wanted);
    }

    static String run(Session session, String... command) {
        String printed = capture(session, command);
        if (printed.contains("RemotingTimeoutException")) {
            // The tool has a limit of 5 s that can't be set, and the machine may not be run as long.
            printed = capture(session, command);
        }
        Check.that(!printed.contains("Exception"), "%s printed %s", command[0], printed);
        return printed;
    }

    private static String capture(Session session, String... command) {
        return Mqadmin.run(session.nameserver, List.of(command));
    }

    static String expect(String printed, String... parts) {
        for (String part : parts) {
            Check.that(printed.contains(part), "no \"%s\" in: %s", part, printed);
        }
        return firstLine(printed);
    }

    static String line(String printed, String part) {
        return printed.lines().filter(each -> each.contains(part)).findFirst()
            .orElseThrow(() -> new AssertionError("no \"" + part + "\" in: " + printed));
    }

    private static String firstLine(String text) {
        return text.strip().lines().findFirst().orElse("");
    }

    /** Where the one broker of the cluster is. */
    record Place(String cluster, String broker, String address) {
        static Place of(Session session) throws Exception {
            ClusterInfo info = session.admin().examineBrokerClusterInfo();
            Map.Entry<String, Set<String>> cluster =
                info.getClusterAddrTable().entrySet().iterator().next();
            String name = cluster.getValue().iterator().next();
            BrokerData broker = info.getBrokerAddrTable().get(name);
            return new Place(cluster.getKey(), name, broker.getBrokerAddrs().get(0L));
        }
    }
}
