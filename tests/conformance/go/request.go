package main

import (
	"context"
	"errors"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const replyTimeout = 50 * time.Second

// request sends its bodies as requests, one after the other, reports each reply, and stays until
// standard input is closed.
func request(o options) {
	p, err := rocketmq.NewProducer(o.ofProducer()...)
	check(err)
	check(p.Start())
	ask := p.Request
	if o.Async {
		ask = func(
			ctx context.Context, timeout time.Duration, message *primitive.Message,
		) (*primitive.Message, error) {
			return requestAsync(ctx, p, timeout, message)
		}
	}
	for _, body := range o.Bodies {
		message := primitive.NewMessage(o.Topic, []byte(body))
		reply, err := ask(context.Background(), replyTimeout, message)
		check(err)
		if reply == nil {
			check(errors.New("no reply and no error"))
		}
		report("replied", fields{"body": body, "reply": string(reply.Body)})
	}
	// The broker answers the replier once this client has confirmed the reply.
	waitForEnd()
	check(p.Shutdown())
}

type reply struct {
	message *primitive.Message
	err     error
}

// requestAsync waits for the callback of RequestAsync.
func requestAsync(
	ctx context.Context, p rocketmq.Producer, timeout time.Duration, message *primitive.Message,
) (*primitive.Message, error) {
	replies := make(chan reply, 1)
	err := p.RequestAsync(
		ctx, timeout, func(_ context.Context, message *primitive.Message, err error) {
			// It is called again when the request is forgotten.
			select {
			case replies <- reply{message, err}:
			default:
			}
		}, message,
	)
	if err != nil {
		return nil, err
	}
	first := <-replies
	return first.message, first.err
}

// answer replies to the messages of a topic until standard input is closed.
func answer(o options) {
	p, err := producer.NewDefaultProducer(append(o.ofProducer(),
		producer.WithGroupName(o.Group+"_replies"),
	)...)
	check(err)
	check(p.Start())
	c := member(o, o.Members[0], func(
		ctx context.Context, messages ...*primitive.MessageExt,
	) (consumer.ConsumeResult, error) {
		for _, message := range messages {
			body := o.Replies[string(message.Body)]
			reply, err := consumer.CreateReplyMessage(message, []byte(body))
			check(err)
			// It takes the text for properties, so a reply of the example has no body.
			reply.Body = []byte(body)
			// As in the example: the requester may not be registered at the broker yet.
			time.Sleep(time.Second)
			_, err = p.SendSync(context.Background(), reply)
			check(err)
			report("answered", fields{
				"body": string(message.Body), "to": consumer.GetReplyToClient(message),
			})
		}
		return consumer.ConsumeSuccess, nil
	})
	report("ready", fields{})
	waitForEnd()
	check(c.Shutdown())
	check(p.Shutdown())
}
