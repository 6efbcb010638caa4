"""Partitioned workers: one durable consumer a worker, order within each partition, and handoffs that lose nothing.

partitions, options   partitions and their sources; options of workers and groups
worker                one worker: its pull loop, lanes and handlers; alone, or owned by a member of a group
pull/                 pulls messages into lanes, and sends acknowledgements
dispatch/             keeps order within a partition, and calls the handlers
group/                assigns partitions to workers: identity, assignment, claims, handoff, migration
"""

from typing import TYPE_CHECKING

from penstock.exports import lazily

if TYPE_CHECKING:
    from penstock.consume.hooks import Hooks
    from penstock.consume.messages import Message, MessageContext
    from penstock.consume.verdicts import Reject, Retries, RetryLater
    from penstock.jetstream.kv import Bucket
    from penstock.publish.control import Control
    from penstock.workers.group.assignment import ConsistentHash, RoundRobin, Weighted, Windows
    from penstock.workers.group.migration import Migration
    from penstock.workers.group.operations import Groups
    from penstock.workers.group.overlap import Overlap
    from penstock.workers.group.worker_group import WorkerGroup
    from penstock.workers.options import ConsumerOptions, GroupOptions, WorkerOptions, bucket_name
    from penstock.workers.partitions import Described, Hashed, InBucket, Listed, Partition, SeenInStream, SubjectPattern
    from penstock.workers.worker import Worker

__all__ = [
    "Bucket",
    "ConsistentHash",
    "ConsumerOptions",
    "Control",
    "Described",
    "GroupOptions",
    "Groups",
    "Hashed",
    "Hooks",
    "InBucket",
    "Listed",
    "Message",
    "MessageContext",
    "Migration",
    "Overlap",
    "Partition",
    "Reject",
    "Retries",
    "RetryLater",
    "RoundRobin",
    "SeenInStream",
    "SubjectPattern",
    "Weighted",
    "Windows",
    "Worker",
    "WorkerGroup",
    "WorkerOptions",
    "bucket_name",
]

__getattr__ = lazily(
    __name__,
    {
        "Bucket": "penstock.jetstream.kv",
        "ConsistentHash": "penstock.workers.group.assignment",
        "ConsumerOptions": "penstock.workers.options",
        "Control": "penstock.publish.control",
        "Described": "penstock.workers.partitions",
        "GroupOptions": "penstock.workers.options",
        "Groups": "penstock.workers.group.operations",
        "Hashed": "penstock.workers.partitions",
        "Hooks": "penstock.consume.hooks",
        "InBucket": "penstock.workers.partitions",
        "Listed": "penstock.workers.partitions",
        "Message": "penstock.consume.messages",
        "MessageContext": "penstock.consume.messages",
        "Migration": "penstock.workers.group.migration",
        "Overlap": "penstock.workers.group.overlap",
        "Partition": "penstock.workers.partitions",
        "Reject": "penstock.consume.verdicts",
        "Retries": "penstock.consume.verdicts",
        "RetryLater": "penstock.consume.verdicts",
        "RoundRobin": "penstock.workers.group.assignment",
        "SeenInStream": "penstock.workers.partitions",
        "SubjectPattern": "penstock.workers.partitions",
        "Weighted": "penstock.workers.group.assignment",
        "Windows": "penstock.workers.group.assignment",
        "Worker": "penstock.workers.worker",
        "WorkerGroup": "penstock.workers.group.worker_group",
        "WorkerOptions": "penstock.workers.options",
        "bucket_name": "penstock.workers.options",
    },
)
