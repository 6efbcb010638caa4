"""Three embedded servers that form a cluster on this machine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from penstock.errors import ConfigError, ServerFailed
from penstock.server.embedded import PORT_TRIES, READY_WITHIN, EmbeddedServer, PortTaken
from penstock.server.ports import FREE, free_ports
from penstock.server.server_config import LOOPBACK, ClusterMember
from penstock.settings import Settings

LOOK_EVERY = 0.02  # seconds


class EmbeddedCluster:
    """nats-servers of one cluster, each with a directory of its own below `data`.

    `ports` fixes the client ports; `options` are the fields of `ServerConfig` and go to every node. Nodes may be
    stopped, killed and started one by one (`cluster.nodes[0].kill()`), and keep their ports.
    """

    def __init__(
        self,
        data: str | Path,
        nodes: int = 3,
        *,
        name: str = "penstock",
        ports: Sequence[int] | None = None,
        leaf_ports: Sequence[int] | None = None,
        on_exit: Callable[[EmbeddedServer], None] | None = None,
        **options: Any,
    ) -> None:
        if nodes < 2:
            raise ConfigError(f"a cluster has 2 nodes or more, not {nodes}; for one, use EmbeddedServer")
        self.name = name
        self.nodes = [
            EmbeddedServer(
                Path(data) / f"node-{n + 1}",
                ports[n] if ports else FREE,
                leaf_port=leaf_ports[n] if leaf_ports else FREE,
                on_exit=on_exit,
                name=f"{name}-{n + 1}",
                **options,
            )
            for n in range(nodes)
        ]

    @property
    def url(self) -> str:
        """The URLs of all nodes, comma-separated."""
        return ",".join(node.url for node in self.nodes)

    @property
    def settings(self) -> Settings:
        """Settings that connect to any node."""
        return self.nodes[0].settings.with_servers(*(node.url for node in self.nodes))

    @property
    def alive(self) -> bool:
        """Whether every node is running."""
        return all(node.alive for node in self.nodes)

    @property
    def leader(self) -> EmbeddedServer | None:
        """The node that leads JetStream's meta group, if there is one right now."""
        names = {self._leader_seen_by(node) for node in self.nodes if node.alive}
        return next((node for node in self.nodes if node.config.server_name in names), None)

    def start(self) -> Self:
        """Start all nodes; return when each knows the leader and the leader knows each."""
        asked = [node.config for node in self.nodes]
        for attempt in range(1, PORT_TRIES + 1):
            try:
                return self._start_together()
            except PortTaken:
                self.kill()
                if attempt == PORT_TRIES:
                    raise
                for node, config in zip(self.nodes, asked, strict=True):
                    node.config = config
            except ServerFailed:
                self.kill()
                raise
        raise AssertionError("the last attempt returns or raises")

    def _start_together(self) -> Self:
        self._join()
        for node in self.nodes:
            node.spawn()
        self._wait_until_complete()
        return self

    def _join(self) -> None:
        """Tell the nodes of each other; route ports, once found, are kept over restarts."""
        if all(node.config.cluster for node in self.nodes):
            return
        routes, password = tuple(free_ports(len(self.nodes), LOOPBACK)), secrets.token_hex(16)
        for node, port in zip(self.nodes, routes, strict=True):
            member = ClusterMember(name=self.name, port=port, route_ports=routes, password=password)
            node.config = replace(node.config, cluster=member)

    def _wait_until_complete(self, within: float = READY_WITHIN) -> None:
        """A leader is not enough: until it counts all peers as current, a stream with three replicas is refused.

        All nodes are watched at once: without every one of them a new cluster chooses no leader, so when one has ended,
        the others would only be waited for.
        """
        deadline = time.monotonic() + within
        while not (self._all_ready() and self._complete()):
            if time.monotonic() >= deadline:
                raise ServerFailed(
                    f"the cluster of {len(self.nodes)} nodes was not complete within {within:g} s; "
                    f"last words of its first node: {self.nodes[0].last_words()}"
                )
            time.sleep(LOOK_EVERY)

    def _all_ready(self) -> bool:
        """Every node is asked, also behind one that is not ready: it raises when one has ended."""
        ready = [node.is_ready() for node in self.nodes]
        return all(ready)

    def _complete(self) -> bool:
        leader = self.leader
        if not leader:
            return False
        meta = leader.monitor("/jsz").get("meta_cluster") or {}
        current = [peer for peer in meta.get("replicas") or () if peer.get("current")]
        return len(current) == len(self.nodes) - 1

    @staticmethod
    def _leader_seen_by(node: EmbeddedServer) -> str | None:
        try:
            return (node.monitor("/jsz").get("meta_cluster") or {}).get("leader")
        except (OSError, ServerFailed):
            return None  # it is starting or ending

    def stop(self) -> None:
        """Stop all nodes cleanly, together."""
        for node in self.nodes:
            node.ask_to_stop()
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        """SIGKILL to all nodes."""
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
