package headrace.bench;

import com.sun.management.OperatingSystemMXBean;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Counts messages and latencies between open() and close(), and the CPU time both sides used.
 *
 * <p>What completes outside of the window is not counted, so that neither the start of a client
 * nor its end is measured.
 */
final class Meter {
    private static final int SAMPLES_MAX = 1 << 22;
    private static final long TICK_MICROS = 10_000;
    private static final OperatingSystemMXBean OWN_PROCESS =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

    private final Path brokerStat;
    private final AtomicLong messages = new AtomicLong();
    private final AtomicInteger errors = new AtomicInteger();
    private final AtomicInteger samples = new AtomicInteger();
    private long[] latencyNanos = new long[SAMPLES_MAX];
    private volatile boolean isOpen;
    private long startNanos;
    private long endNanos;
    private long clientCpuNanos;
    private long brokerCpuTicks;

    Meter(long brokerPid) {
        this.brokerStat = Path.of("/proc", Long.toString(brokerPid), "stat");
    }

    void open() throws IOException {
        brokerCpuTicks = brokerTicks();
        clientCpuNanos = OWN_PROCESS.getProcessCpuTime();
        startNanos = System.nanoTime();
        isOpen = true;
    }

    void close() throws IOException {
        isOpen = false;
        endNanos = System.nanoTime();
        clientCpuNanos = OWN_PROCESS.getProcessCpuTime() - clientCpuNanos;
        brokerCpuTicks = brokerTicks() - brokerCpuTicks;
    }

    /** One request that took from sentNanos to now and carried this many messages. */
    void answered(long sentNanos, int count) {
        if (isOpen) {
            messages.addAndGet(count);
            int sample = samples.getAndIncrement();
            if (sample < SAMPLES_MAX) {
                latencyNanos[sample] = System.nanoTime() - sentNanos;
            }
        }
    }

    void received(int count) {
        if (isOpen) {
            messages.addAndGet(count);
        }
    }

    /** Latencies taken by somebody else, in place of those of answered(). */
    void latencies(long[] nanos) {
        latencyNanos = nanos;
        samples.set(nanos.length);
    }

    void failed() {
        errors.incrementAndGet();
    }

    Map<String, Object> report() {
        double seconds = (endNanos - startNanos) / 1e9;
        long count = messages.get();
        Map<String, Object> report = new LinkedHashMap<>();
        if (count == 0) {
            return report;
        }
        report.put("messages", count);
        report.put("seconds", seconds);
        report.put("errors", errors.get());
        report.put("rate", count / seconds);
        report.put("broker_cpu_us", brokerCpuTicks * TICK_MICROS / (double) count);
        report.put("client_cpu_us", clientCpuNanos / 1e3 / count);
        addLatencies(report);
        return report;
    }

    private void addLatencies(Map<String, Object> report) {
        int count = Math.min(samples.get(), SAMPLES_MAX);
        if (count > 0) {
            Arrays.sort(latencyNanos, 0, count);
            report.put("p50_us", latencyNanos[(int) (count * 0.5)] / 1e3);
            report.put("p99_us", latencyNanos[(int) (count * 0.99)] / 1e3);
            report.put("p999_us", latencyNanos[(int) (count * 0.999)] / 1e3);
            report.put("max_us", latencyNanos[count - 1] / 1e3);
        }
    }

    /** User and system time; the fields are counted from behind the command's name. */
    private long brokerTicks() throws IOException {
        String stat = Files.readString(brokerStat);
        String[] fields = stat.substring(stat.lastIndexOf(')') + 2).split(" ");
        return Long.parseLong(fields[11]) + Long.parseLong(fields[12]);
    }
}
