"""For tests of and with Penstock: real servers, one a test, in well under a second.

The pytest fixtures are registered by installing the package: a test that takes `nats_server` gets its own server.
"""

from penstock.testing.polling import eventually, eventually_async

__all__ = ["eventually", "eventually_async"]
