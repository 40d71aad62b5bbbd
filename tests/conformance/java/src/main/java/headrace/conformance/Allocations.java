package headrace.conformance;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Random;
import java.util.Set;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByConfig;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * What the official client's strategies allocate to one member of random groups, a line each:
 * brokers, queues of each, members, rooms, the member's number, a number in the members' names, and
 * for each strategy the member's queues as bits, the first queue lowest, in hexadecimal.
 * tests/clients/test_strategies.py names queues and members by the same rule, and has the command.
 */
final class Allocations {
    private static final String[] LETTERS = {"", "a", "Z", "-", "\u00e9", "\uff5e", "\ud83d\ude00"};

    private Allocations() {
    }

    public static void main(String[] arguments) throws IOException {
        Random random = new Random(2026);
        StringBuilder lines = new StringBuilder();
        for (int count = Integer.parseInt(arguments[0]); count > 0; count--) {
            lines.append(line(random)).append('\n');
        }
        Files.writeString(Path.of(arguments[1]), lines);
    }

    private static String line(Random random) {
        int brokers = 1 + random.nextInt(6);
        int queueCount = 1 + random.nextInt(8);
        int memberCount = 1 + random.nextInt(random.nextBoolean() ? 4 : 24);
        int rooms = 1 + random.nextInt(4);
        int me = random.nextInt(memberCount);
        int salt = 1 + random.nextInt(9999);
        List<MessageQueue> queues = new ArrayList<>();
        for (int broker = 0; broker < brokers; broker++) {
            for (int queue = 0; queue < queueCount; queue++) {
                queues.add(new MessageQueue("topic-" + salt, "r" + broker % rooms + "@b" + broker, queue));
            }
        }
        List<String> members = new ArrayList<>();
        for (int number = 0; number < memberCount; number++) {
            String letter = LETTERS[(salt + number) % LETTERS.length];
            members.add("r" + (salt + number) % (rooms + 1) + "@" + letter + salt * (number + 7) % 10_007);
        }
        String id = members.get(me);
        Collections.sort(queues);
        Collections.sort(members);
        StringBuilder line = new StringBuilder(
            String.join(" ", List.of("" + brokers, "" + queueCount, "" + memberCount, "" + rooms, "" + me, "" + salt)));
        for (AllocateMessageQueueStrategy strategy : strategies(queues)) {
            Set<MessageQueue> mine = new HashSet<>(strategy.allocate("g", id, queues, members));
            BigInteger bits = BigInteger.ZERO;
            for (int index = 0; index < queues.size(); index++) {
                if (mine.contains(queues.get(index))) {
                    bits = bits.setBit(index);
                }
            }
            line.append(' ').append(bits.toString(16));
        }
        return line.toString();
    }

    private static List<AllocateMessageQueueStrategy> strategies(List<MessageQueue> queues) {
        AllocateMessageQueueByConfig config = new AllocateMessageQueueByConfig();
        config.setMessageQueueList(queues.subList(0, (queues.size() + 1) / 2));
        AllocateMessageQueueByMachineRoom room = new AllocateMessageQueueByMachineRoom();
        room.setConsumeridcs(Set.of("r0", "r2"));
        return List.of(
            new AllocateMessageQueueAveragely(),
            new AllocateMessageQueueAveragelyByCircle(),
            config,
            room,
            nearby(new AllocateMessageQueueAveragely()),
            nearby(new AllocateMessageQueueAveragelyByCircle()),
            new AllocateMessageQueueConsistentHash(),
            new AllocateMessageQueueConsistentHash(3));
    }

    private static AllocateMessageQueueStrategy nearby(AllocateMessageQueueStrategy inner) {
        return new AllocateMachineRoomNearby(inner, new AllocateMachineRoomNearby.MachineRoomResolver() {
            @Override
            public String brokerDeployIn(MessageQueue queue) {
                return queue.getBrokerName().split("@")[0];
            }

            @Override
            public String consumerDeployIn(String clientId) {
                return clientId.split("@")[0];
            }
        });
    }
}
