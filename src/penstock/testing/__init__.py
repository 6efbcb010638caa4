"""For tests of and with Penstock: real servers, one a test, in well under a second.

Installing the package registers its pytest fixtures: a test that takes `nats_server` gets a server of its own,
`nats_cluster` three nodes, `nats_leaf` a hub with a leaf, `tls_certificates` a CA with server and client certificates.
"""

from penstock.broker.cluster import EmbeddedCluster
from penstock.broker.embedded import EmbeddedServer
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
    "eventually",
    "eventually_async",
    "issue_certificates",
    "leaf_pair",
    "letter_subject",
    "run_handler",
    "stream_data",
    "stream_messages",
]
