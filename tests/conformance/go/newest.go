//go:build newest

package main

import (
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const unknownState = primitive.UnkonwnState

func producerTLS(o options) []producer.Option {
	return []producer.Option{producer.WithTls(o.TLS)}
}

func consumerTLS(o options) []consumer.Option {
	return []consumer.Option{consumer.WithTls(o.TLS)}
}
