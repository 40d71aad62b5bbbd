package headrace.conformance;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.route.QueueData;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;
import org.apache.rocketmq.remoting.protocol.statictopic.TopicQueueMappingInfo;
import org.apache.rocketmq.remoting.rpc.ClientMetadata;

/**
 * The leaders that the official client finds in random routes of a static topic, a line each: the
 * route as the official nameserver writes it, a tab, and the brokers of queues 0, 1, 2, ...
 * tests/clients/test_static_topics.py has the command.
 */
final class StaticRoutes {
    private StaticRoutes() {
    }

    public static void main(String[] arguments) throws IOException {
        Random random = new Random(2026);
        StringBuilder lines = new StringBuilder();
        for (int count = Integer.parseInt(arguments[0]); count > 0; count--) {
            TopicRouteData route = route(random);
            lines.append(new String(route.encode(), StandardCharsets.UTF_8));
            lines.append('\t').append(leaders(route)).append('\n');
        }
        Files.writeString(Path.of(arguments[1]), lines);
    }

    private static TopicRouteData route(Random random) {
        TopicRouteData route = new TopicRouteData();
        route.setQueueDatas(new ArrayList<>());
        route.setBrokerDatas(new ArrayList<>());
        route.setFilterServerTable(new HashMap<>());
        Map<String, TopicQueueMappingInfo> infos = new HashMap<>();
        int brokers = 1 + random.nextInt(4);
        long epoch = 1_700_000_000_000L;
        for (int number = 0; number < brokers; number++) {
            String name = "b" + random.nextInt(100);
            epoch += random.nextBoolean() ? 1 + random.nextInt(2000) : 1L << 33;
            TopicQueueMappingInfo info = new TopicQueueMappingInfo("T", 1 + random.nextInt(12), name, epoch);
            ConcurrentMap<Integer, Integer> ids = new ConcurrentHashMap<>();
            for (int queue = 0; queue < 12; queue++) {
                if (random.nextInt(3) == 0) {
                    ids.put(queue, random.nextInt(30));
                }
            }
            info.setCurrIdMap(ids);
            infos.put(name, info);
            if (random.nextInt(4) > 0) {
                HashMap<Long, String> addresses = new HashMap<>();
                addresses.put(0L, "127.0.0.1:" + (10_000 + number));
                route.getBrokerDatas().add(new BrokerData("c", name, addresses));
                QueueData queues = new QueueData();
                queues.setBrokerName(name);
                queues.setPerm(6);
                queues.setReadQueueNums(30);
                queues.setWriteQueueNums(30);
                route.getQueueDatas().add(queues);
            }
        }
        route.setTopicQueueMappingByBroker(infos);
        return route;
    }

    private static String leaders(TopicRouteData route) {
        ConcurrentMap<MessageQueue, String> found =
            ClientMetadata.topicRouteData2EndpointsForStaticTopic("T", route);
        Map<Integer, String> byId = new TreeMap<>();
        for (Map.Entry<MessageQueue, String> each : found.entrySet()) {
            byId.put(each.getKey().getQueueId(), each.getKey().getBrokerName() + "/" + each.getValue());
        }
        List<String> names = new ArrayList<>(byId.values());
        return String.join(" ", names);
    }
}
