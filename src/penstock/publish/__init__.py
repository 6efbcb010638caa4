"""Atomic batches and fast ingest: all or nothing, and at the server's speed."""

from penstock.publish.advisories import Abandonment, AbandonmentCounts, Abandonments
from penstock.publish.atomic import AtomicBatch, ChunkedBatch, Publisher
from penstock.publish.batch import Batch
from penstock.publish.blocking import BlockingBatch, BlockingChunkedBatch, BlockingPublisher
from penstock.publish.errors import (
    BadId,
    BatchOutcomeUnknown,
    BatchRejected,
    DuplicateId,
    Gap,
    NobodyListens,
    NotEnabled,
    RepeatedId,
    StreamFull,
    TimedOut,
    TooLarge,
    TooManyInFlight,
    UnsupportedHeader,
    WrongSequence,
)
from penstock.publish.fast import FastIngest
from penstock.publish.fast_blocking import BlockingFastIngest
from penstock.publish.interruptions import (
    FastIngestDisabled,
    IngestGap,
    IngestInterrupted,
    MessageRefused,
    WrongStream,
)
from penstock.publish.model import BatchAck, BatchRef
from penstock.publish.options import FastAck, IngestOptions, Lost

__all__ = [
    "Abandonment",
    "AbandonmentCounts",
    "Abandonments",
    "AtomicBatch",
    "BadId",
    "Batch",
    "BatchAck",
    "BatchOutcomeUnknown",
    "BatchRef",
    "BatchRejected",
    "BlockingBatch",
    "BlockingChunkedBatch",
    "BlockingFastIngest",
    "BlockingPublisher",
    "ChunkedBatch",
    "DuplicateId",
    "FastAck",
    "FastIngest",
    "FastIngestDisabled",
    "Gap",
    "IngestGap",
    "IngestInterrupted",
    "IngestOptions",
    "Lost",
    "MessageRefused",
    "NobodyListens",
    "NotEnabled",
    "Publisher",
    "RepeatedId",
    "StreamFull",
    "TimedOut",
    "TooLarge",
    "TooManyInFlight",
    "UnsupportedHeader",
    "WrongSequence",
    "WrongStream",
]
