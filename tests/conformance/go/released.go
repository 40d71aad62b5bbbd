//go:build !newest

package main

import (
	"errors"

	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

const unknownState = primitive.UnknowState

func producerTLS(o options) []producer.Option {
	checkNoTLS(o)
	return nil
}

func consumerTLS(o options) []consumer.Option {
	checkNoTLS(o)
	return nil
}

func checkNoTLS(o options) {
	if o.TLS {
		check(errors.New("client-go v2.1.2 has no TLS: build with -modfile=newest.mod -tags newest"))
	}
}
