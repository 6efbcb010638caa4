"""Workers of a group.

identity       worker ids, leader election, and their leases
assignment     assigns partitions to workers: strategies, timing, publication in KV
claims         the owner and the progress of each partition, in KV
handoff        the steps that move a partition to another worker, without I/O
member         one worker under one id, from joining to leaving
leader         the leader's duties: retires dead workers, assigns partitions
worker_group   a worker of a group, for programs: joins and rejoins
overview       the state of a group, read from outside
operations     an operator's actions on a group
migration      moves from one consumer per partition to a group, step by step
overlap        runs both sides of a migration at the same time
"""
