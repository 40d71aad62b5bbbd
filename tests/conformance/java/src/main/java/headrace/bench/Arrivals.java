package headrace.bench;

import java.io.IOException;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/** Counts received messages. The first batch opens the window and is not in it; the last closes it. */
final class Arrivals {
    private static final int TIMEOUT_SECONDS = 120;

    private final Job job;
    private final Meter meter;
    private final AtomicInteger received = new AtomicInteger();
    private final CountDownLatch complete = new CountDownLatch(1);

    Arrivals(Job job, Meter meter) {
        this.job = job;
        this.meter = meter;
    }

    void count(int messages) {
        if (messages == 0) {
            return;
        }
        int before = received.getAndAdd(messages);
        meter.received(messages);
        try {
            if (before == 0) {
                meter.open();
            }
            if (before < job.messages() && before + messages >= job.messages()) {
                meter.close();
                complete.countDown();
            }
        } catch (IOException brokerIsGone) {
            meter.failed();
        }
    }

    boolean isComplete() {
        return complete.getCount() == 0;
    }

    /** Throws IllegalStateException when messages are missing after two minutes. */
    void await() throws InterruptedException {
        if (!complete.await(TIMEOUT_SECONDS, TimeUnit.SECONDS)) {
            throw new IllegalStateException(
                "received " + received.get() + " of " + job.messages() + " messages of " + job.topic()
                    + " in " + TIMEOUT_SECONDS + " s");
        }
    }
}
