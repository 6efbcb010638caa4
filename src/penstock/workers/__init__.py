"""Partitioned workers: one durable consumer a worker, order within each partition, and handoffs that lose nothing.

partitions, ownership, filters, lanes, pacing, verdicts   decisions without I/O
consumer                                                  the worker's durable consumer and its updates
session, dispatch, worker                                 the pull loop and the handlers
assignment, lease, handoff, stabilization                 decisions of a group, without I/O
kv, identity, election, claims, publication, sources      what a group has in KV
member, leader, group                                     a worker that takes part in a group
"""

from typing import TYPE_CHECKING

from penstock.exports import lazily

if TYPE_CHECKING:
    from penstock.workers.assignment import ConsistentHash, RoundRobin, Weighted
    from penstock.workers.group import WorkerGroup
    from penstock.workers.group_options import GroupOptions, bucket_name
    from penstock.workers.hooks import Hooks
    from penstock.workers.kv import Bucket, Control
    from penstock.workers.messages import Message, MessageContext
    from penstock.workers.migration import Migration
    from penstock.workers.operations import Groups
    from penstock.workers.options import ConsumerOptions, WorkerOptions
    from penstock.workers.overlap import Overlap
    from penstock.workers.partitions import Partition, SubjectPattern
    from penstock.workers.sources import Described, Hashed, InBucket, Listed, SeenInStream
    from penstock.workers.stabilization import Windows
    from penstock.workers.verdicts import Reject, Retries, RetryLater
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
        "Bucket": "penstock.workers.kv",
        "ConsistentHash": "penstock.workers.assignment",
        "ConsumerOptions": "penstock.workers.options",
        "Control": "penstock.workers.kv",
        "Described": "penstock.workers.sources",
        "GroupOptions": "penstock.workers.group_options",
        "Groups": "penstock.workers.operations",
        "Hashed": "penstock.workers.sources",
        "Hooks": "penstock.workers.hooks",
        "InBucket": "penstock.workers.sources",
        "Listed": "penstock.workers.sources",
        "Message": "penstock.workers.messages",
        "MessageContext": "penstock.workers.messages",
        "Migration": "penstock.workers.migration",
        "Overlap": "penstock.workers.overlap",
        "Partition": "penstock.workers.partitions",
        "Reject": "penstock.workers.verdicts",
        "Retries": "penstock.workers.verdicts",
        "RetryLater": "penstock.workers.verdicts",
        "RoundRobin": "penstock.workers.assignment",
        "SeenInStream": "penstock.workers.sources",
        "SubjectPattern": "penstock.workers.partitions",
        "Weighted": "penstock.workers.assignment",
        "Windows": "penstock.workers.stabilization",
        "Worker": "penstock.workers.worker",
        "WorkerGroup": "penstock.workers.group",
        "WorkerOptions": "penstock.workers.options",
        "bucket_name": "penstock.workers.group_options",
    },
)
