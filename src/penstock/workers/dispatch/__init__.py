"""Calls handlers: in order within a partition, partitions concurrently.

lanes        which message of a partition may be handled next, without I/O
dispatcher   the tasks that call handlers, and the outcome of each message
"""
