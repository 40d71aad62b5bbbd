package headrace.conformance;

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;

/**
 * Serves requests from standard input, so that one JVM serves many tests.
 *
 * <p>A request is a line that holds a JSON array of words: {@code dump NAMESERVER TOPICS GROUPS}
 * with commas within the lists, {@code mqadmin NAMESERVER COMMAND ...}, or what Members serves:
 * {@code join ...}, {@code received CLIENT_ID}, {@code leave CLIENT_ID}, or {@code compacted ...},
 * which Compacted serves, or {@code ask ...}, {@code serve ...}, {@code hush GROUP}, which Requests
 * serves. The answer is a line that holds an object: {@code printed}, and
 * {@code failure} where there was one.
 */
public final class Console {
    private Console() {
    }

    public static void main(String[] arguments) throws Exception {
        Capture.install();
        BufferedReader requests =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = requests.readLine()) != null;) {
            System.out.println(JSON.toJSONString(answer(JSON.parseArray(line, String.class))));
        }
        // Clients leave threads behind that are no daemons.
        Runtime.getRuntime().halt(0);
    }

    private static Map<String, String> answer(List<String> words) {
        try {
            return Map.of("printed", run(words));
        } catch (Exception failure) {
            StringWriter trace = new StringWriter();
            failure.printStackTrace(new PrintWriter(trace));
            return Map.of("failure", trace.toString());
        }
    }

    private static String run(List<String> words) throws Exception {
        return switch (words.get(0)) {
            case "compacted" -> Compacted.run(words.subList(1, words.size()));
            case "dump" -> Dump.of(words.get(1), words.get(2).split(","), words.get(3).split(","));
            case "join" -> Members.join(words.subList(1, words.size()));
            case "received" -> Members.received(words.get(1));
            case "leave" -> Members.leave(words.get(1));
            case "ask" -> Requests.ask(words.subList(1, words.size()));
            case "serve" -> Requests.serve(words.subList(1, words.size()));
            case "hush" -> Requests.hush(words.get(1));
            case "mqadmin" -> Mqadmin.run(words.get(1), words.subList(2, words.size()));
            default -> throw new IllegalArgumentException("no request: " + words);
        };
    }
}
