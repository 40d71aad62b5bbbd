// Runs rocketmq-client-go along the paths of its examples and prints one JSON object per event.
// The program ends when its standard input is closed.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2/primitive"
)

var scenarios = map[string]func(options){
	"answer":      answer,
	"consume":     consume,
	"request":     request,
	"send":        send,
	"transaction": transaction,
}

type options struct {
	Group string `json:"group"`
	Topic string `json:"topic"`

	// Credentials, when there are some; TLS is for the newest client-go, see newest.go.
	User     string `json:"user"`
	Password string `json:"password"`
	TLS      bool   `json:"tls"`

	Trace bool `json:"trace"` // into RMQ_SYS_TRACE_TOPIC

	// Of "send" and "request".
	Bodies []string `json:"bodies"`

	// Of "send".
	Batch      bool              `json:"batch"`       // all bodies in one batch
	DelayLevel int               `json:"delay_level"` // 0: not delayed
	Keys       int               `json:"keys"`        // number of sharding keys; 0: queues in turn
	Properties map[string]string `json:"properties"`

	// Of "request".
	Async bool `json:"async"`

	// Of "answer": the reply to each body; those that are not listed get one without a body.
	Replies map[string]string `json:"replies"`

	// Of "transaction": the answers about each message, joined by "-"; they are its body, too.
	Transactions []string `json:"transactions"`

	// Of "consume", and "answer", which has one.
	Members       []string `json:"members"`
	Broadcast     bool     `json:"broadcast"`
	Orderly       bool     `json:"orderly"`
	Strategy      string   `json:"strategy"`
	Failures      int32    `json:"failures"`       // attempts of each message that fail
	RetryLevel    int      `json:"retry_level"`    // delay level of retries
	MaxReconsumes int32    `json:"max_reconsumes"` // -1: the client's default

	resolver primitive.NsResolver
}

func main() {
	scenario := flag.String("scenario", "", "a name in the list above")
	nameserver := flag.String("nameserver", "", "host:port")
	text := flag.String("options", "", "options of the scenario as a JSON object")
	flag.Parse()
	run, ok := scenarios[*scenario]
	if !ok {
		check(fmt.Errorf("there is no scenario %q", *scenario))
	}
	config := options{MaxReconsumes: -1, Strategy: "averagely"}
	decoder := json.NewDecoder(bytes.NewBufferString(*text))
	decoder.DisallowUnknownFields()
	check(decoder.Decode(&config))
	config.resolver = primitive.NewPassthroughResolver([]string{*nameserver})
	run(config)
}

func (o options) credentials() primitive.Credentials {
	return primitive.Credentials{AccessKey: o.User, SecretKey: o.Password}
}

func (o options) traceConfig() *primitive.TraceConfig {
	return &primitive.TraceConfig{
		Access:      primitive.Local,
		Resolver:    o.resolver,
		Credentials: o.credentials(),
	}
}

type fields map[string]interface{}

var output sync.Mutex

func report(event string, more fields) {
	more["event"] = event
	more["at_ms"] = time.Now().UnixNano() / int64(time.Millisecond)
	line, err := json.Marshal(more)
	check(err)
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(line))
}

// waitForEnd returns when standard input is closed.
func waitForEnd() {
	_, err := io.Copy(io.Discard, os.Stdin)
	check(err)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
