package headrace.bench;

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Map;
import org.apache.rocketmq.client.producer.DefaultMQProducer;

/**
 * Reads jobs from standard input, one JSON object a line, and answers each with a report.
 *
 * <p>"open" starts the producer that the sends up to "close" use.
 */
public final class Driver {
    private DefaultMQProducer producer;

    public static void main(String[] arguments) throws Exception {
        Driver driver = new Driver();
        BufferedReader jobs = new BufferedReader(new InputStreamReader(System.in));
        for (String line = jobs.readLine(); line != null; line = jobs.readLine()) {
            System.out.println(JSON.toJSONString(driver.answer(JSON.parseObject(line, Job.class))));
        }
        // Clients leave threads behind that are no daemons.
        System.exit(0);
    }

    private Map<String, Object> answer(Job job) {
        try {
            return run(job);
        } catch (Exception failure) {
            failure.printStackTrace();
            return Map.of("failure", failure.toString());
        }
    }

    private Map<String, Object> run(Job job) throws Exception {
        Meter meter = new Meter(job.brokerPid());
        switch (job.work()) {
            case "open" -> producer = Sends.startProducer(job.nameserver());
            case "close" -> producer.shutdown();
            case "drain_lite", "drain_push" -> Drains.run(job, meter);
            case "request" -> Requests.run(job, meter, producer);
            case "paced", "end_to_end" -> Paced.run(job, meter, producer);
            default -> Sends.run(job, meter, producer);
        }
        return meter.report();
    }
}
