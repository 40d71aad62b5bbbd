package main

import (
	"context"
	"strconv"
	"strings"
	"sync"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

func (o options) ofProducer() []producer.Option {
	found := append(producerTLS(o),
		producer.WithGroupName(o.Group),
		producer.WithNsResolver(o.resolver),
		producer.WithRetry(2),
		producer.WithCredentials(o.credentials()),
	)
	if o.Trace {
		found = append(found, producer.WithTrace(o.traceConfig()))
	}
	return found
}

// send reports each message before and after it is sent.
func send(o options) {
	config := o.ofProducer()
	if o.Keys > 0 {
		config = append(config, producer.WithQueueSelector(producer.NewHashQueueSelector()))
	}
	p, err := rocketmq.NewProducer(config...)
	check(err)
	check(p.Start())
	if o.Batch {
		sendBatch(p, o)
	} else {
		sendEach(p, o)
	}
	if o.Trace {
		// What it has not written yet is lost at the end; the example waits for 10 s.
		waitForEnd()
	}
	check(p.Shutdown())
}

// sendBatch reports what was sent once, as the batch has one answer.
func sendBatch(p rocketmq.Producer, o options) {
	messages := []*primitive.Message{}
	for _, body := range o.Bodies {
		messages = append(messages, primitive.NewMessage(o.Topic, []byte(body)))
	}
	result, err := p.SendSync(context.Background(), messages...)
	check(err)
	report("sent", fields{
		"queue":        result.MessageQueue.QueueId,
		"queue_offset": result.QueueOffset,
		"status":       int(result.Status),
	})
}

func sendEach(p rocketmq.Producer, o options) {
	for number, body := range o.Bodies {
		message := primitive.NewMessage(o.Topic, []byte(body))
		message.WithProperties(o.Properties)
		if o.DelayLevel > 0 {
			message.WithDelayTimeLevel(o.DelayLevel)
		}
		if o.Keys > 0 {
			message.WithShardingKey(strconv.Itoa(number % o.Keys))
		}
		report("sending", fields{"body": body})
		result, err := p.SendSync(context.Background(), message)
		check(err)
		report("sent", fields{
			"body":         body,
			"message_id":   result.MsgID,
			"queue":        result.MessageQueue.QueueId,
			"queue_offset": result.QueueOffset,
			"status":       int(result.Status),
		})
	}
}

var states = map[string]primitive.LocalTransactionState{
	"commit":   primitive.CommitMessageState,
	"rollback": primitive.RollbackMessageState,
	"unknown":  unknownState,
}

// outcomes answers about each message what its body lists, in this order.
type outcomes struct {
	lock  sync.Mutex
	given map[string]int
}

func (o *outcomes) next(event, body, id string) primitive.LocalTransactionState {
	o.lock.Lock()
	defer o.lock.Unlock()
	listed := strings.Split(body, "-")
	state := "unknown"
	if o.given[body] < len(listed) {
		state = listed[o.given[body]]
	}
	o.given[body]++
	report(event, fields{"body": body, "state": state, "transaction_id": id})
	return states[state]
}

func (o *outcomes) ExecuteLocalTransaction(
	message *primitive.Message,
) primitive.LocalTransactionState {
	return o.next("executed", string(message.Body), message.TransactionId)
}

func (o *outcomes) CheckLocalTransaction(
	message *primitive.MessageExt,
) primitive.LocalTransactionState {
	return o.next("checked", string(message.Body), message.TransactionId)
}

// transaction sends its messages and answers checks until standard input is closed.
func transaction(o options) {
	listener := &outcomes{given: map[string]int{}}
	p, err := rocketmq.NewTransactionProducer(listener, o.ofProducer()...)
	check(err)
	check(p.Start())
	for _, body := range o.Transactions {
		message := primitive.NewMessage(o.Topic, []byte(body))
		result, err := p.SendMessageInTransaction(context.Background(), message)
		check(err)
		report("sent", fields{"body": body, "message_id": result.MsgID})
	}
	waitForEnd()
	check(p.Shutdown())
}
