"""Order within a partition, partitions side by side.

lanes        which message of a partition may be handled next, without I/O
dispatcher   the tasks that call handlers, and what becomes of a message after that
"""
