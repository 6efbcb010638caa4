"""The embedded nats-server: one node, a cluster of three, a leaf of a hub."""
