package headrace.apachetests;

import com.alibaba.fastjson2.JSON;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.junit.runner.Description;
import org.junit.runner.JUnitCore;
import org.junit.runner.notification.Failure;
import org.junit.runner.notification.RunListener;

/**
 * Runs Apache RocketMQ's test classes, several side by side, and prints a JSON line for each test.
 *
 * <p>Arguments: number of classes at a time, then classes below {@code org.apache.rocketmq.test}.
 */
public final class Runner {
    private static final String PACKAGE = "org.apache.rocketmq.test.";

    private Runner() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream results = System.out;
        // Tests and their clients print.
        System.setOut(System.err);
        ExecutorService lanes = Executors.newFixedThreadPool(Integer.parseInt(arguments[0]));
        List<Future<?>> runs = new ArrayList<>();
        for (String name : List.of(arguments).subList(1, arguments.length)) {
            Class<?> tests = Class.forName(PACKAGE + name, false, Runner.class.getClassLoader());
            runs.add(lanes.submit(() -> run(tests, results)));
        }
        for (Future<?> run : runs) {
            run.get();
        }
        // Clients leave threads behind that are no daemons.
        Runtime.getRuntime().halt(0);
    }

    private static void run(Class<?> tests, PrintStream results) {
        JUnitCore core = new JUnitCore();
        core.addListener(new Report(results));
        core.run(tests);
    }

    /** Of one class, whose tests run one after the other. */
    private static final class Report extends RunListener {
        private final PrintStream results;
        private final Map<Description, Failure> failures = new HashMap<>();
        private long started;

        Report(PrintStream results) {
            this.results = results;
        }

        @Override
        public void testStarted(Description test) {
            started = System.nanoTime();
        }

        @Override
        public void testFailure(Failure failure) {
            failures.put(failure.getDescription(), failure);
            if (failure.getDescription().isSuite()) {
                testFinished(failure.getDescription());
            }
        }

        @Override
        public void testFinished(Description test) {
            Failure failure = failures.get(test);
            Map<String, Object> result = new LinkedHashMap<>();
            result.put("test", name(test));
            result.put("ok", failure == null);
            result.put("detail", failure == null ? "" : failure.getTrace());
            result.put("ms", (System.nanoTime() - started) / 1_000_000);
            results.println(JSON.toJSONString(result));
        }

        /** Class and method; the class alone when its set-up failed. */
        private static String name(Description test) {
            String tests = test.getClassName().substring(PACKAGE.length());
            return test.getMethodName() == null ? tests : tests + "." + test.getMethodName();
        }
    }
}
