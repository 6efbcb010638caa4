"""From the server to a lane, and the answer back.

consumer   the durable consumer of a worker, and the updates of its filters
filters    from partitions to filter subjects, without I/O
session    the pull requests, deliveries and acknowledgements of one connection
puller     one session after the other, which lane a message goes to, and periodic maintenance
stored     reading and counting messages without a consumer
"""
