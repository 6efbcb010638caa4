"""Servers for tests beyond the single one: a hub with a leaf, and certificates to make either speak TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.server.embedded import EmbeddedServer
from penstock.server.server_config import ServerTls
from penstock.testing.polling import WITHIN, eventually


@dataclass(frozen=True, slots=True)
class LeafPair:
    """A hub and a leaf of it, linked, with JetStream domains of their own."""

    hub: EmbeddedServer
    leaf: EmbeddedServer

    def wait_until_linked(self, within: float = WITHIN) -> None:
        """Return when each reaches the other's JetStream."""
        eventually(self._linked, within, "hub and leaf to reach each other", state=self.leaf.last_words)

    def _linked(self) -> bool:
        hub, leaf = self.hub.config.jetstream_domain, self.leaf.config.jetstream_domain
        hears = self.leaf.reaches(hub) if hub else self.leaf.linked
        return hears and leaf is not None and self.hub.reaches(leaf)


@contextmanager
def leaf_pair(
    data: Path, hub_domain: str | None = "hub", leaf_domain: str = "leaf", **options: Any
) -> Iterator[LeafPair]:
    """A hub and its leaf for the length of the block; `options` go to the hub."""
    with (
        EmbeddedServer(data / "hub", domain=hub_domain, **options) as hub,
        EmbeddedServer(data / "leaf", domain=leaf_domain, leaf_of=hub.leaf_url, tls=options.get("tls")) as leaf,
    ):
        pair = LeafPair(hub, leaf)
        pair.wait_until_linked()
        yield pair


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of a CA and of what it signed: a server certificate for loopback, and a client certificate."""

    ca: str
    server_cert: str
    server_key: str
    client_cert: str
    client_key: str

    def server_tls(self, verify: bool = False) -> ServerTls:
        """TLS for an `EmbeddedServer`; with `verify`, its `settings` carry the client certificate."""
        return ServerTls(
            cert=self.server_cert,
            key=self.server_key,
            ca=self.ca,
            verify=verify,
            client_cert=self.client_cert if verify else None,
            client_key=self.client_key if verify else None,
        )


def issue_certificates(directory: Path) -> Certificates:
    """A CA of its own with a server and a client certificate, in `directory`. Needs `penstock-nats[testing]`."""
    import trustme

    directory.mkdir(parents=True, exist_ok=True)
    ca = trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.pem")
    paths = [str(directory / "ca.pem")]
    for name, issued in (
        ("server", ca.issue_cert("127.0.0.1", "::1", "localhost")),
        ("client", ca.issue_cert("client@penstock.test")),
    ):
        issued.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
        issued.private_key_pem.write_to_path(directory / f"{name}.key")
        paths += [str(directory / f"{name}.pem"), str(directory / f"{name}.key")]
    return Certificates(*paths)
