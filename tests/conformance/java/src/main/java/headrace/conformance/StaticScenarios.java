package headrace.conformance;

import static headrace.conformance.AdminScenarios.expect;
import static headrace.conformance.AdminScenarios.line;
import static headrace.conformance.AdminScenarios.run;

import headrace.conformance.AdminScenarios.Place;
import java.util.Map;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageQueue;

/** mqadmin's commands on a static topic, whose queues all name one logic broker. */
final class StaticScenarios {
    private static final String LOGIC = "__syslo__global__";
    private static final int QUEUES = 3;

    private StaticScenarios() {
    }

    static void addTo(Map<String, Scenario> scenarios) {
        scenarios.put("static_updateStaticTopic", StaticScenarios::updateStaticTopic);
        scenarios.put("static_remappingStaticTopic", StaticScenarios::remappingStaticTopic);
        scenarios.put("static_topicStatus", StaticScenarios::topicStatus);
        scenarios.put("static_topicRoute", StaticScenarios::topicRoute);
        scenarios.put("static_updateTopicPerm", StaticScenarios::updateTopicPerm);
        scenarios.put("static_deleteTopic", StaticScenarios::deleteTopic);
        scenarios.put("static_resetOffsetByTime", StaticScenarios::resetOffsetByTime);
    }

    /** Made, and made larger. */
    private static String updateStaticTopic(Session session) throws Exception {
        createStatic(session, QUEUES);
        createStatic(session, QUEUES + 2);
        for (int queue = 0; queue < QUEUES + 2; queue++) {
            MessageQueue to = new MessageQueue(session.topic(), LOGIC, queue);
            SendResult sent = session.producer().send(session.message(queue), to);
            // The client names the broker that has answered, not the logic one.
            Check.equal(queue, sent.getMessageQueue().getQueueId(), "queue");
            Check.equal(0L, sent.getQueueOffset(), "offset");
        }
        session.readAll(session.topic(), QUEUES + 2);
        return QUEUES + 2 + " queues";
    }

    /** To the broker that already leads all queues: the epoch rises, and no queue moves. */
    private static String remappingStaticTopic(Session session) throws Exception {
        createStatic(session, QUEUES);
        session.send(0, 7, null);
        String printed = run(session, "remappingStaticTopic",
            "-t", session.topic(), "-b", Place.of(session).broker());
        expect(printed, "mapping data is written to file", ".before", ".after");
        session.send(7, 9, null);
        session.readAll(session.topic(), 9);
        return "9 messages";
    }

    private static String topicStatus(Session session) throws Exception {
        createStatic(session, 1);
        session.send(0, 7, null);
        session.readAll(session.topic(), 7);
        String printed = run(session, "topicStatus", "-t", session.topic());
        return expect(line(printed, LOGIC), " 0 ", " 7 ");
    }

    private static String topicRoute(Session session) throws Exception {
        createStatic(session, QUEUES);
        Place place = Place.of(session);
        return expect(run(session, "topicRoute", "-t", session.topic()).replaceAll("\\s", ""),
            "\"brokerName\":\"" + place.broker() + "\"", place.address(),
            "\"readQueueNums\":3", "\"topicQueueMappingByBroker\"", "\"totalQueues\":3",
            "\"currIdMap\":{0:0,1:1,2:2}");
    }

    /** Which leaves the queues as they are. */
    private static String updateTopicPerm(Session session) throws Exception {
        createStatic(session, QUEUES);
        Place place = Place.of(session);
        for (String perm : new String[] {"4", "6"}) {
            String printed = run(session, "updateTopicPerm",
                "-c", place.cluster(), "-t", session.topic(), "-p", perm);
            expect(printed, "update topic perm from", "to " + perm, "success");
        }
        session.send(0, 5, null);
        session.readAll(session.topic(), 5);
        return "6 to 4 to 6";
    }

    /** After which the name is free for a plain topic. */
    private static String deleteTopic(Session session) throws Exception {
        createStatic(session, QUEUES);
        session.send(0, 1, null);
        expect(run(session, "deleteTopic", "-c", Place.of(session).cluster(),
            "-t", session.topic()), "from cluster", "from NameServer", "success");
        String list = run(session, "topicList");
        Check.that(!list.contains(session.topic() + System.lineSeparator()), "still listed");
        return "gone";
    }

    private static String resetOffsetByTime(Session session) throws Exception {
        createStatic(session, 1);
        session.send(0, 9, null);
        Inbox inbox = new Inbox();
        DefaultMQPushConsumer consumer = AdminScenarios.startConsumer(session, inbox);
        inbox.await(9);
        consumer.shutdown();
        String printed = run(session, "resetOffsetByTime", "-g", session.group(),
            "-t", session.topic(), "-s", "1000");
        Inbox again = new Inbox();
        AdminScenarios.startConsumer(session, again);
        again.await(9);
        return printed;
    }

    private static void createStatic(Session session, int queues) throws Exception {
        String printed = run(session, "updateStaticTopic", "-b", Place.of(session).broker(),
            "-t", session.topic(), "-qn", "" + queues);
        expect(printed, "The new mapping data is written to file");
        // Starts the producer, which looks the route up.
        session.producer();
        session.awaitRoute(queues);
    }
}
