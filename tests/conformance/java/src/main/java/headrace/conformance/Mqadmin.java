package headrace.conformance;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.ServiceThread;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Runs mqadmin's own commands in this process. */
final class Mqadmin {
    private static final int LOOK_MS = 10;
    private static final ScheduledExecutorService WATCH =
        Executors.newSingleThreadScheduledExecutor(Mqadmin::daemon);

    private Mqadmin() {
    }

    /**
     * What the command prints, errors included.
     *
     * <p>One command at a time: each names its client after the current millisecond.
     */
    static synchronized String run(String nameserver, List<String> command) {
        List<String> arguments = new ArrayList<>(command);
        arguments.addAll(List.of("-n", nameserver));
        Thread runner = Thread.currentThread();
        ScheduledFuture<?> watch = WATCH.scheduleWithFixedDelay(
            () -> hurryShutdown(runner), LOOK_MS, LOOK_MS, TimeUnit.MILLISECONDS);
        try {
            return Capture.of(() -> MQAdminStartup.main(arguments.toArray(String[]::new)));
        } finally {
            watch.cancel(false);
        }
    }

    /** A client's shutdown joins a thread that polls its queue every 3 s; an interrupt wakes it. */
    private static void hurryShutdown(Thread runner) {
        boolean joins = Arrays.stream(runner.getStackTrace()).anyMatch(
            frame -> frame.getClassName().equals(ServiceThread.class.getName())
                && frame.getMethodName().equals("shutdown"));
        if (joins) {
            Thread.getAllStackTraces().keySet().stream()
                .filter(thread -> thread.getName().equals("NettyEventExecutor"))
                .forEach(Thread::interrupt);
        }
    }

    private static Thread daemon(Runnable body) {
        Thread thread = new Thread(body, "mqadmin watch");
        thread.setDaemon(true);
        return thread;
    }
}
