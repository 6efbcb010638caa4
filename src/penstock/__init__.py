"""Penstock carries NATS JetStream streams into Apache Spark and partitioned workers and back."""

from typing import TYPE_CHECKING

from penstock.exports import lazily

if TYPE_CHECKING:
    from penstock import packs
    from penstock.app import App, Message
    from penstock.app.blocking import connect_blocking
    from penstock.app.client import Client, connect
    from penstock.consume.verdicts import Reject, RetryLater
    from penstock.errors import PenstockError
    from penstock.facts import BlockingFacts, FactConflict, Facts, ForeignReceipt, NewFact, StaleReceipt
    from penstock.gateway import BlockingGatewayClient, GatewayLogin
    from penstock.settings import Settings
    from penstock.sourcing.bridge import Bridge, BridgeConfig
    from penstock.sourcing.flow import Flow
    from penstock.sourcing.mapping import Mapping
    from penstock.sourcing.receiver import Receiver, consumer_config

__version__ = "0.2.0"
__all__ = [
    "App",
    "BlockingFacts",
    "BlockingGatewayClient",
    "Bridge",
    "BridgeConfig",
    "Client",
    "FactConflict",
    "Facts",
    "Flow",
    "ForeignReceipt",
    "GatewayLogin",
    "Mapping",
    "Message",
    "NewFact",
    "PenstockError",
    "Receiver",
    "Reject",
    "RetryLater",
    "Settings",
    "StaleReceipt",
    "__version__",
    "connect",
    "connect_blocking",
    "consumer_config",
    "packs",
]

__getattr__ = lazily(
    __name__,
    {
        "App": "penstock.app",
        "BlockingFacts": "penstock.facts",
        "BlockingGatewayClient": "penstock.gateway",
        "Bridge": "penstock.sourcing.bridge",
        "BridgeConfig": "penstock.sourcing.bridge",
        "Client": "penstock.app.client",
        "FactConflict": "penstock.facts",
        "Facts": "penstock.facts",
        "Flow": "penstock.sourcing.flow",
        "ForeignReceipt": "penstock.facts",
        "GatewayLogin": "penstock.gateway",
        "Mapping": "penstock.sourcing.mapping",
        "Message": "penstock.app",
        "NewFact": "penstock.facts",
        "PenstockError": "penstock.errors",
        "Receiver": "penstock.sourcing.receiver",
        "Reject": "penstock.consume.verdicts",
        "RetryLater": "penstock.consume.verdicts",
        "Settings": "penstock.settings",
        "StaleReceipt": "penstock.facts",
        "connect": "penstock.app.client",
        "connect_blocking": "penstock.app.blocking",
        "consumer_config": "penstock.sourcing.receiver",
        "packs": "penstock.packs",
    },
)
