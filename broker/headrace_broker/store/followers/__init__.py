"""What is made from the queues minutes later, such as a copy of them."""
