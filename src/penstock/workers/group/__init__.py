"""Workers of a group.

identity       who a worker is, who leads, and for how long
assignment     who gets which partition: strategies, when to decide, how it is published
claims         who owns a partition and how far it is done, in KV
handoff        the steps by which a partition changes hands, without I/O
member         one life of a worker in its group
leader         what the leader does besides: gives up the dead, assigns
worker_group   a worker of a group, for programs: joins, and joins again
overview       how a group stands, seen from outside
operations     what an operator does with a group
migration      from one consumer a partition to a group, step by step
overlap        both sides of a migration at work at the same time
"""
