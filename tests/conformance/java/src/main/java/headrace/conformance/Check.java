package headrace.conformance;

import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.Callable;

/** Assertions that name what was expected and what came. */
final class Check {
    private Check() {
    }

    static void that(boolean holds, String format, Object... args) {
        if (!holds) {
            throw new AssertionError(String.format(format, args));
        }
    }

    static void equal(Object expected, Object actual, String what) {
        that(Objects.equals(expected, actual), "%s: expected %s, got %s", what, expected, actual);
    }

    /** Polls until the count is reached; what comes late is asynchronous on the other side. */
    static void eventuallyAtLeast(long wanted, Callable<? extends Number> count, String what)
            throws Exception {
        long[] seen = {0};
        try {
            eventually(Session.LIMIT, () -> (seen[0] = count.call().longValue()) >= wanted, what);
        } catch (AssertionError late) {
            throw new AssertionError(late.getMessage() + ": got " + seen[0] + " of " + wanted);
        }
    }

    /** Polls until the condition holds; index, dispatch and rebalance are asynchronous. */
    static void eventually(Duration limit, Callable<Boolean> condition, String what)
            throws Exception {
        long deadline = System.nanoTime() + limit.toNanos();
        while (!condition.call()) {
            that(System.nanoTime() < deadline, "not within %s: %s", limit, what);
            Thread.sleep(5);
        }
    }
}
