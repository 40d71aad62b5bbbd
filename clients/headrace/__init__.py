"""Producer, consumers and admin for headrace and Apache RocketMQ."""
