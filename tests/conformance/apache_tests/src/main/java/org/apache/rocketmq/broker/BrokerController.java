package org.apache.rocketmq.broker;

import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** A running broker as the tests see it: its address, and settings that have no effect. */
public final class BrokerController {
    private final String address;

    public BrokerController(String address) {
        this.address = address;
    }

    public String getBrokerAddr() {
        return address;
    }

    public BrokerConfig getBrokerConfig() {
        return new BrokerConfig();
    }

    public MessageStoreConfig getMessageStoreConfig() {
        return new MessageStoreConfig();
    }
}
