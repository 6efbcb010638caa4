"""Pulls messages from the server into lanes, and sends acknowledgements.

consumer   the durable consumer of a worker, and the updates of its filters
filters    from partitions to filter subjects, without I/O
session    the pull requests, deliveries and acknowledgements of one connection
puller     runs one session after the other, routes messages to lanes, and does periodic maintenance
stored     reading and counting messages without a consumer
"""
