package headrace.bench;

/**
 * One measurement, as the Python side orders it.
 *
 * @param work open, close, sync, async, batch, fill, drain_lite, drain_push, paced, end_to_end,
 *     delayed, transactions or send_back
 * @param bodyBytes size of each body
 * @param threads senders of a sync, batch or transactions job
 * @param inFlight most unanswered sends of an async, delayed or send_back job
 * @param rate messages a second of a paced job
 * @param seconds length of a sending job's window
 * @param messages how many a fill sends and a drain reads
 * @param delayLevel of end_to_end and delayed messages; 0 for none
 * @param timerMillis delay of end_to_end and delayed messages without a level; 0 for none
 * @param brokerPid process whose CPU time is charged
 */
public record Job(
    String work,
    String nameserver,
    String topic,
    String group,
    int bodyBytes,
    int threads,
    int inFlight,
    double rate,
    double seconds,
    int messages,
    int delayLevel,
    long timerMillis,
    long brokerPid) {
}
