"""Partitioned workers: one durable consumer a worker, order within each partition, and handoffs that lose nothing.

partitions, ownership, filters, lanes, pacing, verdicts   decisions without I/O
consumer                                                  the worker's durable consumer and its updates
session, dispatch, worker                                 the pull loop and the handlers
"""
