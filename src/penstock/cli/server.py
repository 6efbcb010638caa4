"""`penstock server`: the embedded nats-server in the foreground."""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from penstock.cli.common import err, flag_values, json_option, out, usage
from penstock.cli.terminal import echo
from penstock.errors import ConfigError, ServerFailed
from penstock.printable import json_text
from penstock.server.cluster import EmbeddedCluster
from penstock.server.embedded import EmbeddedServer
from penstock.server.hub import CLIENT_PORT, LEAF_OFFSET, address, leaf_url
from penstock.server.ports import FREE
from penstock.server.server_config import LOOPBACK, ServerConfig, ServerTls, is_loopback
from penstock.settings import without_login
from penstock.units import parse_duration, parse_size

DEFAULT_DATA = ".penstock/server"
HIGHEST_PORT = 65_535


class StopSignal(Exception):
    """We were told to end: SIGINT or SIGTERM."""


@click.command()
@click.option("--nodes", type=click.Choice(["1", "3"]), default="1", show_default=True, help="A cluster has three.")
@click.option("--port", type=click.IntRange(0, HIGHEST_PORT), default=CLIENT_PORT, show_default=True,
              help="Port for clients; nodes of a cluster take the next ones too. 0 takes any free port.")  # fmt: skip
@click.option("--leaf-port", type=click.IntRange(0, HIGHEST_PORT),
              help=f"Port for leaf nodes.  [default: {LEAF_OFFSET} above --port]")  # fmt: skip
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), default=DEFAULT_DATA, show_default=True,
              help="Directory for messages, configuration and log.")  # fmt: skip
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--no-login", is_flag=True, help="Let in whoever reaches --host, though it is not this machine alone.")
@click.option("--leaf-of", metavar="URL", help="Join the server at this URL as a leaf node.")
@click.option("--domain", metavar="NAME", help="JetStream domain.  [default for a leaf: leaf]")
@click.option("--user", metavar="NAME", help="User that clients log in as; goes with --password.")
@click.option("--password", metavar="SECRET", help="Better in the environment: PENSTOCK_SERVER_PASSWORD.")
@click.option("--token", metavar="SECRET", help="Token that clients log in with, instead of a user.")
@click.option("--users", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Users with permissions, by `penstock permissions --write`; --user may do all.")  # fmt: skip
@click.option("--tls-cert", metavar="FILE", help="Certificate of the server; goes with --tls-key.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate.")
@click.option("--tls-ca", metavar="FILE", help="CA that signed the certificates.")
@click.option("--tls-verify", is_flag=True, help="Ask clients for a certificate signed by --tls-ca.")
@click.option("--max-payload", metavar="SIZE", help="Largest message, such as 8MiB.  [default: 1MiB]")
@click.option(
    "--sync-interval", metavar="TIME", help="How often messages are forced to disk: always, 10s.  [default: 2m]"
)
@json_option
def server(nodes: str, port: int, leaf_port: int | None, data: Path, as_json: bool, **options: Any) -> None:
    """Run the embedded nats-server in the foreground until Ctrl-C or SIGTERM.

    Prints its URL when JetStream answers. Ends with exit code 1 when a server dies under it.

    \b
    Example:
      penstock server --data ./nats
      penstock server --nodes 3 --port 0 --json
      penstock server --port 4333 --leaf-of nats://127.0.0.1:4222 --domain edge --data ./edge
    """
    died: queue.SimpleQueue[EmbeddedServer] = queue.SimpleQueue()
    made = _made(int(nodes), port, leaf_port, data, _server_options(options), died)
    with _stopped_by_signals():
        try:
            made.start()
            _announce(made, as_json)
            _complain(died.get())
        except StopSignal:
            err.print("stopping")
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(
                    number, signal.SIG_IGN
                )  # it takes milliseconds; a second Ctrl-C must not leave it half done
            made.stop()


def _server_options(options: dict[str, Any]) -> dict[str, Any]:
    """Flags as fields of `ServerConfig`."""
    tls = {name: options.pop(f"tls_{name}") for name in ("cert", "key", "ca", "verify")}
    if bool(tls["cert"]) != bool(tls["key"]):
        usage("--tls-cert and --tls-key go together: give both, or neither")
    if (tls["ca"] or tls["verify"]) and not tls["cert"]:
        usage("--tls-ca and --tls-verify need a certificate of the server: --tls-cert and --tls-key")
    _require_login(options.pop("no_login"), options, bool(tls["verify"]))
    options["users"] = _users(options["users"]) if options["users"] else ()
    with flag_values():
        options = {**options, **_checked(options)}
    if options["leaf_of"]:
        options["leaf_of"] = leaf_url(options["leaf_of"])
    return {**options, "tls": ServerTls(**tls) if tls["cert"] else None}


def _users(file: Path) -> tuple[dict[str, Any], ...]:
    try:
        users = json.loads(file.read_text(encoding="utf-8"))["authorization"]["users"]
        complete = all(isinstance(one.get("password") or one.get("nkey"), str) for one in users)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"{file} holds no users as `penstock permissions --write` writes them") from exc
    if not users or not complete:
        raise ConfigError(f"{file}: every user needs a password or an nkey; `penstock permissions --write` gives one")
    return tuple(users)


def _require_login(without: bool, options: dict[str, Any], by_certificate: bool) -> None:
    """Refuse to be open to a network by accident: whoever may log in may read and delete every stream."""
    has_login = by_certificate or options["user"] or options["token"] or options["users"]
    if not (without or has_login or is_loopback(options["host"])):
        usage(
            f"--host {options['host']} lets in whoever reaches this machine: give --user and --password, --token or "
            "--tls-verify, or say --no-login"
        )


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are written differently in the server's configuration; raises when one of them is impossible."""
    if options["leaf_of"]:
        address(options["leaf_of"])
    ServerConfig(**{name: options[name] for name in ("user", "password", "token", "users")})
    return {
        "max_payload": _size(options["max_payload"]),
        "sync_interval": _interval(options["sync_interval"]),
    }


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    if not (size := parse_size(text)):
        raise ConfigError("--max-payload must be above 0")
    return size


def _interval(text: str | None) -> str | None:
    """As the server reads it: it knows no days and weeks."""
    if text is None or text == "always":
        return text
    if not (interval := parse_duration(text)):
        raise ConfigError("--sync-interval must be above 0, or `always`")
    return f"{interval.total_seconds():.6f}s"


def _made(
    nodes: int,
    port: int,
    leaf_port: int | None,
    data: Path,
    options: dict[str, Any],
    died: queue.SimpleQueue[EmbeddedServer],
) -> EmbeddedServer | EmbeddedCluster:
    ports, leaf_ports = _ports(nodes, port, leaf_port)
    if nodes == 1:
        return EmbeddedServer(data, ports[0], leaf_port=leaf_ports[0], on_exit=died.put, **options)
    return EmbeddedCluster(data, nodes, ports=ports, leaf_ports=leaf_ports, on_exit=died.put, **options)


def _ports(nodes: int, port: int, leaf_port: int | None) -> tuple[list[int], list[int]]:
    """Ports for clients and for leaf nodes, one a node."""
    highest = HIGHEST_PORT - nodes + 1
    first_leaf = leaf_port if leaf_port is not None else port and port + LEAF_OFFSET
    if port > highest or (leaf_port or 0) > highest:
        usage(f"{nodes} nodes need {nodes} ports: give one of at most {highest}")
    if first_leaf > highest:
        first_leaf = 0
    return _row(port, nodes), _row(first_leaf, nodes)


def _row(first: int, count: int) -> list[int]:
    return [first + n if first else FREE for n in range(count)]


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise StopSignal

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(made: EmbeddedServer | EmbeddedCluster, as_json: bool) -> None:
    """One line of JSON, or the URL on a line of its own; what else one wants to know follows on stderr."""
    servers = [made] if isinstance(made, EmbeddedServer) else made.nodes
    config = servers[0].config
    data = servers[0].data if isinstance(made, EmbeddedServer) else servers[0].data.parent
    if as_json:
        said = {
            "url": made.url,
            "urls": [one.url for one in servers],
            "leaf_urls": [without_login(one.leaf_url) for one in servers],
            "pids": [one.pid for one in servers],
            "data": str(data),
            "domain": config.jetstream_domain,
        }
        echo(json_text(said, sort_keys=True))
        return
    out.print(made.url, soft_wrap=True)
    leaf = ", ".join(without_login(one.leaf_url) for one in servers)
    domain = f" · JetStream domain {config.jetstream_domain}" if config.jetstream_domain else ""
    err.print(f"leaf nodes join at {leaf} · data in {data}{domain} · Ctrl-C stops", soft_wrap=True)


def _complain(dead: EmbeddedServer) -> None:
    for line in dead.log_tail():
        err.print(line, markup=False, soft_wrap=True)
    raise ServerFailed(str(dead.failure()))
