"""Atomic batches and fast ingest."""
