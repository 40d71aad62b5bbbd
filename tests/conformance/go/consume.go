package main

import (
	"context"
	"fmt"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

var strategies = map[string]consumer.AllocateStrategy{
	"averagely":           consumer.AllocateByAveragely,
	"averagely_by_circle": consumer.AllocateByAveragelyCircle,
	"consistent_hash":     consumer.AllocateByConsistentHash(10),
}

// consume runs the members of a group until standard input is closed.
func consume(o options) {
	running := []rocketmq.PushConsumer{}
	for _, name := range o.Members {
		running = append(running, member(o, name, o.handler(name)))
	}
	waitForEnd()
	for _, c := range running {
		check(c.Shutdown())
	}
}

type handler func(context.Context, ...*primitive.MessageExt) (consumer.ConsumeResult, error)

func member(o options, name string, handle handler) rocketmq.PushConsumer {
	strategy, ok := strategies[o.Strategy]
	if !ok {
		check(fmt.Errorf("strategy %q is not known", o.Strategy))
	}
	model := consumer.Clustering
	if o.Broadcast {
		model = consumer.BroadCasting
	}
	config := append(consumerTLS(o),
		consumer.WithGroupName(o.Group),
		consumer.WithInstance(name),
		consumer.WithNsResolver(o.resolver),
		consumer.WithConsumerModel(model),
		consumer.WithConsumerOrder(o.Orderly),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithMaxReconsumeTimes(o.MaxReconsumes),
		consumer.WithStrategy(strategy),
		consumer.WithCredentials(o.credentials()),
	)
	if o.Trace {
		config = append(config, consumer.WithTrace(o.traceConfig()))
	}
	c, err := rocketmq.NewPushConsumer(config...)
	check(err)
	check(c.Subscribe(o.Topic, consumer.MessageSelector{}, handle))
	check(c.Start())
	return c
}

func (o options) handler(name string) handler {
	failure := consumer.ConsumeRetryLater
	if o.Orderly {
		failure = consumer.SuspendCurrentQueueAMoment
	}
	return func(
		ctx context.Context, messages ...*primitive.MessageExt,
	) (consumer.ConsumeResult, error) {
		if retry, ok := primitive.GetConcurrentlyCtx(ctx); ok {
			retry.DelayLevelWhenNextConsume = o.RetryLevel
		}
		result := consumer.ConsumeSuccess
		for _, message := range messages {
			report("received", fields{
				"body":         string(message.Body),
				"member":       name,
				"message_id":   message.MsgId,
				"queue":        message.Queue.QueueId,
				"queue_offset": message.QueueOffset,
				"reconsumed":   message.ReconsumeTimes,
				"topic":        message.Topic,
			})
			if message.ReconsumeTimes < o.Failures {
				result = failure
			}
		}
		return result, nil
	}
}
