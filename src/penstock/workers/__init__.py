"""Partitioned workers: one durable consumer a worker, order within each partition, and handoffs that lose nothing.

partitions, ownership, filters, lanes, pacing, verdicts   decisions without I/O
consumer                                                  the worker's durable consumer and its updates
session, dispatch, worker                                 the pull loop and the handlers
assignment, lease, handoff, stabilization                 decisions of a group, without I/O
kv, identity, election, claims, publication, sources      what a group has in KV
member, leader, group                                     a worker that takes part in a group
"""
