package headrace.conformance;

import com.alibaba.fastjson2.JSON;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/**
 * Runs every scenario against one nameserver and prints one JSON line for each.
 *
 * <p>Arguments: nameserver address, then scenario names (none: all). The wire's header codec is
 * chosen for the whole JVM by -Drocketmq.serialize.type.
 */
public final class Suite {
    private static final int THREADS = 8;

    private final PrintStream out = System.out;
    private final List<Future<?>> runs = new ArrayList<>();
    private final ExecutorService closing = Executors.newCachedThreadPool();
    private final String nameserver;
    private final String codec = System.getProperty("rocketmq.serialize.type", "JSON");

    private Suite(String nameserver) {
        this.nameserver = nameserver;
    }

    public static void main(String[] arguments) throws Exception {
        List<String> names = List.of(arguments).subList(1, arguments.length);
        Suite suite = new Suite(arguments[0]);
        Capture.install();
        suite.submitAll(chosen(names), Executors.newFixedThreadPool(THREADS));
        suite.awaitAll();
        // Clients leave threads behind that are no daemons.
        System.exit(0);
    }

    private static Map<String, Scenario> chosen(List<String> names) {
        Map<String, Scenario> scenarios = new LinkedHashMap<>();
        PushScenarios.addTo(scenarios);
        AdminScenarios.addTo(scenarios);
        LitePullScenarios.addTo(scenarios);
        ProducerScenarios.addTo(scenarios);
        QueryScenarios.addTo(scenarios);
        Requests.addTo(scenarios);
        StaticScenarios.addTo(scenarios);
        if (!names.isEmpty()) {
            scenarios.keySet().retainAll(names);
        }
        return scenarios;
    }

    private void submitAll(Map<String, Scenario> scenarios, ExecutorService pool) {
        scenarios.forEach((name, scenario) -> runs.add(pool.submit(() -> report(name, scenario))));
    }

    private void awaitAll() throws Exception {
        for (Future<?> run : runs) {
            run.get();
        }
        closing.shutdown();
        Check.that(closing.awaitTermination(15, TimeUnit.SECONDS), "clients do not shut down");
    }

    private void report(String name, Scenario scenario) {
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("scenario", name);
        long start = System.nanoTime();
        Session session = new Session(nameserver, name + "_" + codec);
        try {
            result.put("detail", scenario.run(session));
            result.put("ok", true);
        } catch (Throwable failure) {
            result.put("detail", describe(failure));
            result.put("ok", false);
        }
        // A client's shutdown can take 3 s: it waits for a thread of its own to look up.
        closing.submit(session::close);
        result.put("ms", (System.nanoTime() - start) / 1_000_000);
        out.println(JSON.toJSONString(result));
    }

    private static String describe(Throwable failure) {
        if (failure instanceof AssertionError) {
            return failure.getMessage();
        }
        StringWriter trace = new StringWriter();
        failure.printStackTrace(new PrintWriter(trace));
        return trace.toString();
    }
}
