package headrace.conformance;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.remoting.protocol.statictopic.LogicQueueMappingItem;
import org.apache.rocketmq.remoting.protocol.statictopic.TopicConfigAndQueueMapping;
import org.apache.rocketmq.remoting.protocol.statictopic.TopicQueueMappingDetail;
import org.apache.rocketmq.remoting.protocol.statictopic.TopicQueueMappingUtils;
import org.apache.rocketmq.remoting.protocol.statictopic.TopicRemappingDetailWrapper;

/**
 * What the peer's classes compute for random static topics, a JSON object each line: changes of
 * topics ("change"), and chains of items with their check, offsets and look-ups ("chain").
 * tests/protocol/test_statictopic_peer.py reads them, and has the command.
 */
final class StaticTables {
    private static final String TOPIC = "T";

    private final Random random = new Random(2026);
    private final StringBuilder lines = new StringBuilder();

    public static void main(String[] arguments) throws IOException {
        StaticTables tables = new StaticTables();
        for (int count = Integer.parseInt(arguments[0]); count > 0; count--) {
            tables.topic();
            tables.chain();
        }
        Files.writeString(Path.of(arguments[1]), tables.lines);
    }

    // -- changes of a topic ---------------------------------------------------------------------

    private void topic() {
        Set<String> all = new HashSet<>();
        for (int broker = 1 + random.nextInt(5); broker > 0; broker--) {
            all.add("b" + broker);
        }
        Map<String, TopicConfigAndQueueMapping> brokers = new HashMap<>();
        Set<String> targets = some(all);
        int total = 1 + random.nextInt(10);
        change("create", brokers, all, targets, total);
        for (int round = random.nextInt(4); round > 0; round--) {
            if (random.nextInt(3) == 0) {
                total += 1 + random.nextInt(4);
                change("grow", brokers, all, all, total);
            } else {
                change("remap", brokers, all, some(all), total);
            }
        }
    }

    private void change(String kind, Map<String, TopicConfigAndQueueMapping> brokers,
        Set<String> all, Set<String> targets, int total) {
        JSONObject line = new JSONObject(true);
        line.put("kind", kind);
        line.put("all", all);
        line.put("targets", targets);
        line.put("total", total);
        line.put("before", plain(brokers));
        TopicRemappingDetailWrapper wrapper = kind.equals("remap")
            ? TopicQueueMappingUtils.remappingStaticTopic(TOPIC, brokers, targets)
            : TopicQueueMappingUtils.createTopicConfigMapping(TOPIC, total, targets, brokers);
        for (String broker : all) {
            brokers.computeIfAbsent(broker, name -> new TopicConfigAndQueueMapping(
                new TopicConfig(TOPIC, 0, 0),
                new TopicQueueMappingDetail(TOPIC, total, name, wrapper.getEpoch())));
        }
        line.put("after", plain(brokers));
        line.put("epoch", wrapper.getEpoch());
        lines.append(line.toJSONString()).append('\n');
        decide(brokers);
    }

    private void decide(Map<String, TopicConfigAndQueueMapping> brokers) {
        for (TopicConfigAndQueueMapping broker : brokers.values()) {
            for (List<LogicQueueMappingItem> items : broker.getMappingDetail().getHostedQueues().values()) {
                LogicQueueMappingItem leader = items.get(items.size() - 1);
                if (leader.getLogicOffset() < 0) {
                    long end = items.get(items.size() - 2).computeStaticQueueOffsetStrictly(random.nextInt(30_000));
                    leader.setLogicOffset(TopicQueueMappingUtils.blockSeqRoundUp(end, 10_000));
                }
            }
        }
    }

    private Set<String> some(Set<String> all) {
        List<String> names = new ArrayList<>(all);
        Set<String> chosen = new HashSet<>();
        chosen.add(names.get(random.nextInt(names.size())));
        for (String name : names) {
            if (random.nextBoolean()) {
                chosen.add(name);
            }
        }
        return chosen;
    }

    private static JSONObject plain(Map<String, TopicConfigAndQueueMapping> brokers) {
        JSONObject copy = new JSONObject(true);
        brokers.forEach((name, broker) -> {
            JSONObject each = new JSONObject(true);
            each.put("read", broker.getReadQueueNums());
            each.put("write", broker.getWriteQueueNums());
            each.put("mapping", JSON.parse(RemotingSerializable.toJson(broker.getMappingDetail(), false)));
            copy.put(name, each);
        });
        return copy;
    }

    // -- chains ---------------------------------------------------------------------------------

    private void chain() {
        List<LogicQueueMappingItem> items = new ArrayList<>();
        long offset = random.nextInt(3) * 100L;
        int gen = random.nextInt(3);
        int count = 1 + random.nextInt(5);
        for (int number = 0; number < count; number++) {
            boolean last = number == count - 1;
            long logic = last && random.nextInt(4) == 0 ? -1 : offset;
            long end = random.nextInt(3) == 0 ? random.nextInt(120) : -1;
            items.add(new LogicQueueMappingItem(gen, number, "b" + number, logic, 0, end, -1, -1));
            offset += random.nextInt(12) == 0 ? 0 : 100;
            gen += random.nextInt(12) == 0 ? 0 : 1 + random.nextInt(2);
        }
        JSONObject line = new JSONObject(true);
        line.put("kind", "chain");
        line.put("items", JSON.parse(RemotingSerializable.toJson(items, false)));
        boolean accepted = accepts(items);
        line.put("accepted", accepted);
        if (accepted) {
            line.put("looks", looks(items));
        }
        lines.append(line.toJSONString()).append('\n');
    }

    private static boolean accepts(List<LogicQueueMappingItem> items) {
        try {
            TopicQueueMappingUtils.checkLogicQueueMappingItemOffset(items);
            return true;
        } catch (RuntimeException error) {
            return false;
        }
    }

    /** Static offset, gen of its item, its physical offset there, the item's own end, round-up. */
    private JSONArray looks(List<LogicQueueMappingItem> items) {
        JSONArray looks = new JSONArray();
        for (int number = 0; number < 4; number++) {
            long offset = random.nextInt(40_000) / (random.nextBoolean() ? 100 : 1);
            LogicQueueMappingItem item = TopicQueueMappingUtils.findLogicQueueMappingItem(items, offset, true);
            JSONArray look = new JSONArray();
            look.add(offset);
            look.add(item == null ? null : item.getGen());
            look.add(item == null ? null : item.computePhysicalQueueOffset(offset));
            look.add(item == null ? null : item.computeMaxStaticQueueOffset());
            look.add(TopicQueueMappingUtils.blockSeqRoundUp(offset, 10_000));
            looks.add(look);
        }
        return looks;
    }
}
