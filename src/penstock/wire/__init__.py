"""The data plane: frames without I/O, Arrow columns, blocking and asyncio transports.

frames, headers   the protocol as values: encoders and an incremental parser
login, session    decisions of a connection without I/O: endpoints, TLS, identity, events
blocking, aio     the two transports over them, with the same surface
"""
