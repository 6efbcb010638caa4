"""Bodies of messages as documents: JSON, and Avro and Protobuf by the schemas of the platform file. Without Spark."""
