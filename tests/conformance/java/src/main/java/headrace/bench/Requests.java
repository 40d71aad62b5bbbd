package headrace.bench;

import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;

/** Requests that a push consumer in the same JVM answers, each with its own body. */
final class Requests {
    private final Meter meter;
    private final DefaultMQProducer producer;

    private Requests(Meter meter, DefaultMQProducer producer) {
        this.meter = meter;
        this.producer = producer;
    }

    static void run(Job job, Meter meter, DefaultMQProducer producer) throws Exception {
        // Creates the topic: a consumer that finds none looks again only half a minute later.
        producer.send(new Message(job.topic(), new byte[1]));
        DefaultMQPushConsumer consumer = Drains.pushConsumer(job);
        consumer.registerMessageListener(new Requests(meter, producer)::consume);
        consumer.start();
        try {
            Sends.run(job, meter, producer);
        } finally {
            consumer.shutdown();
        }
    }

    private ConsumeConcurrentlyStatus consume(
            List<MessageExt> messages, ConsumeConcurrentlyContext context) {
        for (MessageExt message : messages) {
            if (message.getProperty(MessageConst.PROPERTY_CORRELATION_ID) != null) {
                reply(message);
            }
        }
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
    }

    private void reply(MessageExt request) {
        try {
            producer.send(MessageUtil.createReplyMessage(request, request.getBody()));
        } catch (Exception failure) {
            meter.failed();
        }
    }
}
