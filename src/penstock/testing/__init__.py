"""For tests of and with Penstock: real servers, one a test, in well under a second.

Installing the package registers its pytest fixtures: a test that takes `nats_server` gets a server of its own,
`nats_cluster` three nodes, `nats_leaf` a hub with a leaf, `tls_certificates` a CA with server and client certificates.
`TestApp` runs the handlers of a `penstock.App` in a test, in memory or on such a server.
"""

from typing import TYPE_CHECKING

from penstock.exports import lazily

if TYPE_CHECKING:
    from penstock.server.cluster import EmbeddedCluster
    from penstock.server.embedded import EmbeddedServer
    from penstock.testing.apps import TestApp
    from penstock.testing.contents import stream_data, stream_messages
    from penstock.testing.handlers import Given, HandlerRun, run_handler
    from penstock.testing.letters import letter_subject
    from penstock.testing.polling import eventually, eventually_async
    from penstock.testing.proxy import LossyProxy
    from penstock.testing.servers import Certificates, LeafPair, issue_certificates, leaf_pair

__all__ = [
    "Certificates",
    "EmbeddedCluster",
    "EmbeddedServer",
    "Given",
    "HandlerRun",
    "LeafPair",
    "LossyProxy",
    "TestApp",
    "eventually",
    "eventually_async",
    "issue_certificates",
    "leaf_pair",
    "letter_subject",
    "run_handler",
    "stream_data",
    "stream_messages",
]

__getattr__ = lazily(
    __name__,
    {
        "Certificates": "penstock.testing.servers",
        "EmbeddedCluster": "penstock.server.cluster",
        "EmbeddedServer": "penstock.server.embedded",
        "Given": "penstock.testing.handlers",
        "HandlerRun": "penstock.testing.handlers",
        "LeafPair": "penstock.testing.servers",
        "LossyProxy": "penstock.testing.proxy",
        "TestApp": "penstock.testing.apps",
        "eventually": "penstock.testing.polling",
        "eventually_async": "penstock.testing.polling",
        "issue_certificates": "penstock.testing.servers",
        "leaf_pair": "penstock.testing.servers",
        "letter_subject": "penstock.testing.letters",
        "run_handler": "penstock.testing.handlers",
        "stream_data": "penstock.testing.contents",
        "stream_messages": "penstock.testing.contents",
    },
)
