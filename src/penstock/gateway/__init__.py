"""The fact gateway: fetch, confirm and append as a Connect service. Needs `penstock-nats[gateway]`."""

from penstock.gateway.client import BlockingGatewayClient, GatewayClient, GatewayLogin

__all__ = ["BlockingGatewayClient", "GatewayClient", "GatewayLogin"]
