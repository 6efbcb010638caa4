"""From the server to a lane, and the answer back: the durable consumer, pull requests, reading without a consumer."""
