package headrace.bench;

/**
 * One measurement, as the Python side orders it.
 *
 * @param work open, close, sync, async, batch, fill, drain_lite, drain_push, paced, end_to_end or
 *     request
 * @param bodyBytes size of each body
 * @param threads senders of a sync, batch or request job
 * @param inFlight most unanswered sends of an async job
 * @param rate messages a second of a paced job
 * @param seconds length of a sending job's window
 * @param messages how many a fill sends and a drain reads
 * @param filter SQL92 condition of a drain; a fill with one gives its messages the properties
 * @param pop a push consumer lets the broker decide whether it pops
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
    String filter,
    boolean pop,
    long brokerPid) {
}
