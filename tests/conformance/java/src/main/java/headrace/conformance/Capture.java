package headrace.conformance;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;

/** Catches what this thread prints to System.out and System.err; other threads print as before. */
final class Capture extends OutputStream {
    private static final ThreadLocal<ByteArrayOutputStream> CAUGHT = new ThreadLocal<>();

    private final PrintStream otherwise;

    private Capture(PrintStream otherwise) {
        this.otherwise = otherwise;
    }

    static void install() {
        System.setOut(new PrintStream(new Capture(System.out), true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(new Capture(System.err), true, StandardCharsets.UTF_8));
    }

    static String of(Runnable printer) {
        ByteArrayOutputStream caught = new ByteArrayOutputStream();
        CAUGHT.set(caught);
        try {
            printer.run();
        } finally {
            CAUGHT.remove();
        }
        return caught.toString(StandardCharsets.UTF_8);
    }

    @Override
    public void write(int value) throws IOException {
        target().write(value);
    }

    @Override
    public void write(byte[] bytes, int offset, int length) throws IOException {
        target().write(bytes, offset, length);
    }

    private OutputStream target() {
        OutputStream caught = CAUGHT.get();
        return caught == null ? otherwise : caught;
    }
}
