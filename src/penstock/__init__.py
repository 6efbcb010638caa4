"""Penstock carries NATS JetStream streams into Apache Spark and partitioned workers and back."""

__version__ = "0.1.0"
