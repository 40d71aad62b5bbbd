package headrace.conformance;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

import org.apache.rocketmq.filter.expression.BooleanExpression;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.parser.SelectorParser;

/**
 * Apache's answers to filters. Lines of the input: R and the properties of a record, then E and an
 * expression, both in base64. For each expression a line: "refused", or a letter for each record: T,
 * F, N for null, E for an exception.
 */
public final class FilterAnswers {

    private FilterAnswers() {
    }

    public static void main(String[] args) throws IOException {
        List<Map<String, String>> records = new ArrayList<>();
        BufferedReader input = new BufferedReader(
            new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        StringBuilder answers = new StringBuilder();
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String text = new String(
                Base64.getDecoder().decode(line.substring(1)), StandardCharsets.UTF_8);
            if (line.charAt(0) == 'R') {
                records.add(properties(text));
            } else {
                answers.append(answer(text, records)).append('\n');
            }
        }
        System.out.print(answers);
    }

    private static Map<String, String> properties(String text) {
        Map<String, String> properties = new HashMap<>();
        for (String entry : text.split("\u0002")) {
            int at = entry.indexOf('\u0001');
            if (at > 0 && at + 1 < entry.length()) {
                properties.put(entry.substring(0, at), entry.substring(at + 1));
            }
        }
        return properties;
    }

    private static String answer(String text, List<Map<String, String>> records) {
        BooleanExpression expression;
        try {
            expression = SelectorParser.parse(text);
        } catch (Throwable refused) {
            return "refused";
        }
        StringBuilder letters = new StringBuilder();
        for (Map<String, String> record : records) {
            letters.append(evaluate(expression, record));
        }
        return letters.toString();
    }

    private static char evaluate(BooleanExpression expression, Map<String, String> record) {
        EvaluationContext context = new EvaluationContext() {
            @Override
            public Object get(String name) {
                return record.get(name);
            }

            @Override
            public Map<String, Object> keyValues() {
                return new HashMap<>(record);
            }
        };
        try {
            Object value = expression.evaluate(context);
            return value == null ? 'N' : Boolean.TRUE.equals(value) ? 'T' : 'F';
        } catch (Throwable error) {
            return 'E';
        }
    }
}
