package headrace.conformance;

import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.common.AppendResult;
import org.apache.rocketmq.tieredstore.file.FlatFileFactory;
import org.apache.rocketmq.tieredstore.file.FlatMessageFile;
import org.apache.rocketmq.tieredstore.index.IndexItem;
import org.apache.rocketmq.tieredstore.index.IndexStoreService;
import org.apache.rocketmq.tieredstore.metadata.DefaultMetadataStore;
import org.apache.rocketmq.tieredstore.util.MessageFormatUtil;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;

/**
 * One queue of a tier on a folder, read or continued by Apache's own classes; see
 * tests/conformance/test_tier_files.py.
 *
 * <p>Arguments: what to do, the store's folder, the tier's folder, topic, queue, a file. The file
 * has records, each after its tags code (long) and size (int): those to append, or those found.
 */
final class TierFiles {
    private static final String BROKER = "broker";
    private static final long ALL_TIME = Long.MAX_VALUE / 2;

    private final FlatFileFactory factory;
    private final FlatMessageFile queue;
    private final String topic;
    private final int queueId;

    private TierFiles(String root, String folder, String topic, int queueId) {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(root);
        config.setTieredStoreFilePath(folder);
        config.setBrokerClusterName("cluster");
        config.setBrokerName(BROKER);
        config.setTieredBackendServiceProvider("org.apache.rocketmq.tieredstore.provider.PosixFileSegment");
        config.setTieredStoreCommitLogMaxSize(2000);
        config.setTieredStoreConsumeQueueMaxSize(200);
        config.setTieredStoreIndexFileMaxHashSlotNum(13);
        config.setTieredStoreIndexFileMaxIndexNum(50);
        // The records are older than the default, and the index deletes expired files by itself.
        config.setTieredStoreFileReservedTime(1_000_000);
        this.topic = topic;
        this.queueId = queueId;
        factory = new FlatFileFactory(new DefaultMetadataStore(config), config);
        queue = new FlatMessageFile(factory, topic, queueId);
    }

    public static void main(String[] arguments) throws IOException {
        TierFiles tier =
            new TierFiles(arguments[1], arguments[2], arguments[3], Integer.parseInt(arguments[4]));
        Path file = Path.of(arguments[5]);
        switch (arguments[0]) {
            case "append" -> tier.append(ByteBuffer.wrap(Files.readAllBytes(file)));
            case "read" -> Files.write(file, tier.read());
            case "find" -> Files.writeString(file, tier.find(Files.readAllLines(file)));
            default -> throw new IllegalArgumentException(arguments[0]);
        }
        // Apache's threads would keep the process.
        System.exit(0);
    }

    private IndexStoreService index() {
        IndexStoreService index =
            new IndexStoreService(factory, MessageStoreUtil.getIndexFilePath(BROKER));
        index.start();
        return index;
    }

    private void append(ByteBuffer input) {
        IndexStoreService index = index();
        while (input.hasRemaining()) {
            long tagsCode = input.getLong();
            int size = input.getInt();
            ByteBuffer record = input.slice(input.position(), size);
            input.position(input.position() + size);
            if (!queue.isFlatFileInit()) {
                queue.initOffset(MessageFormatUtil.getQueueOffset(record));
            }
            append(index, record, size, tagsCode);
        }
        require(queue.commitAsync().join());
        queue.flushMetadata();
        index.forceUpload();
    }

    private void append(IndexStoreService index, ByteBuffer record, int size, long tagsCode) {
        require(queue.appendCommitLog(record) == AppendResult.SUCCESS);
        long place = queue.getCommitLogMaxOffset() - size;
        long storeTime = MessageFormatUtil.getStoreTimeStamp(record);
        Map<String, String> properties = MessageFormatUtil.getProperties(record);
        Set<String> keys = new HashSet<>();
        keys.add(properties.get(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX));
        keys.addAll(List.of(properties.get(MessageConst.PROPERTY_KEYS).split(" ")));
        long offset = MessageFormatUtil.getQueueOffset(record);
        require(queue.appendConsumeQueue(new DispatchRequest(
            topic, queueId, place, size, tagsCode, storeTime, offset, "", "", 0, 0, Map.of()))
            == AppendResult.SUCCESS);
        index.putKey(topic, (int) queue.getTopicId(), queueId, keys, place, size, storeTime);
    }

    private byte[] read() throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        DataOutputStream output = new DataOutputStream(bytes);
        long end = queue.getConsumeQueueCommitOffset();
        for (long offset = queue.getConsumeQueueMinOffset(); offset < end; offset++) {
            ByteBuffer unit = queue.getConsumeQueueAsync(offset).join();
            byte[] record = new byte[MessageFormatUtil.getSizeFromItem(unit)];
            queue.getMessageAsync(offset).join().get(record);
            output.writeLong(MessageFormatUtil.getTagCodeFromItem(unit));
            output.writeInt(record.length);
            output.write(record);
        }
        return bytes.toByteArray();
    }

    /** The places that each key finds, a line for each. */
    private String find(List<String> keys) {
        IndexStoreService index = index();
        StringBuilder lines = new StringBuilder();
        for (String key : keys) {
            lines.append(key);
            index.queryAsync(topic, key, 512, 0, ALL_TIME).join().stream()
                .map(IndexItem::getOffset).sorted()
                .forEach(place -> lines.append(' ').append(place));
            lines.append('\n');
        }
        return lines.toString();
    }

    private static void require(boolean isGood) {
        if (!isGood) {
            throw new IllegalStateException("the tier did not take a record");
        }
    }
}
