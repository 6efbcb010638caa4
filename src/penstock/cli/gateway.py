"""`penstock gateway`: fetch, confirm and append as a Connect service."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.common import SECONDS, Context, err, flag_values, out, sync, usage
from penstock.cli.terminal import log_to_stderr
from penstock.errors import ConfigError
from penstock.topology.load import load

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--env", metavar="NAME", help="Environment of the platform file.")
@click.option(
    "--listen",
    default="127.0.0.1:8443",
    show_default=True,
    metavar="HOST:PORT",
    help="Port 0: any free one; without a host: all interfaces.",
)
@click.option("--admin", metavar="HOST:PORT", help="Health, readiness and metrics, in plain HTTP.  [default: nowhere]")
@click.option("--admin-exposed", is_flag=True, help="Let --admin listen beyond loopback, in plain HTTP for everybody.")
@click.option("--cert", metavar="FILE", help="The gateway's certificate, in PEM form.")
@click.option("--key", metavar="FILE", help="Its key.")
@click.option("--client-ca", metavar="FILE", help="CA of the callers' certificates; without it only tokens count.")
@click.option("--require-certificate", is_flag=True, help="Refuse callers without a certificate in the handshake.")
@click.option("--insecure", is_flag=True, help="Plain HTTP; only on loopback.")
@click.option("--drain", type=SECONDS, default=5.0, show_default=True, help="Seconds between not ready and the end.")
@click.pass_obj
@sync
async def gateway(
    context: Context,
    file: Path,
    env: str | None,
    listen: str,
    admin: str | None,
    admin_exposed: bool,
    cert: str | None,
    key: str | None,
    client_ca: str | None,
    require_certificate: bool,
    insecure: bool,
    drain: float,
) -> None:
    """Serve the gateway that the platform FILE declares, until SIGTERM or Ctrl-C.

    Callers prove who they are with a client certificate or a bearer token, and may do what `gateway.identities` of the
    file grants them. Any number of gateways may run side by side: none keeps state. It ends gracefully: not ready
    first, then no new connections, then the calls under way are finished.

    \b
    Example:
      penstock gateway penstock.yaml --listen 0.0.0.0:8443 --cert gw.pem --key gw.key --client-ca callers.pem \\
        --admin 127.0.0.1:9464
    """
    platform = load(file, env)
    if platform.gateway is None or not platform.gateway.identities:
        raise ConfigError(f"{file}: nobody may call the gateway: declare `gateway.identities`")
    (host, port), operators = address("--listen", listen), address("--admin", admin) if admin else None
    _check_tls(host, cert, key, client_ca, require_certificate, insecure)
    _check_admin(operators[0] if operators else None, admin_exposed)
    try:
        from penstock.gateway.server import GatewayListen, serve
    except ImportError as exc:
        raise ConfigError(
            f"the gateway needs more packages ({exc.name} is missing): pip install 'penstock-nats[gateway]'"
        ) from exc
    where = GatewayListen(
        host=host,
        port=port,
        admin_host=operators[0] if operators else "127.0.0.1",
        admin_port=operators[1] if operators else None,
        cert=cert,
        key=key,
        client_ca=client_ca,
        require_certificate=require_certificate,
        drain=drain,
    )
    for flag, text in (("--listen", listen), ("--admin", admin or "")):
        if text.startswith(":"):
            err.print(f"{flag} {text} means all interfaces of this machine, as 0.0.0.0{text} does", soft_wrap=True)
    log_to_stderr("%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = context.settings_below_flags(**platform.environment.settings_overrides())
    await serve(settings, platform.gateway, where, _ready)


def _ready(url: str, admin: str | None) -> None:
    if admin:
        err.print(f"health, readiness and metrics at {admin}", soft_wrap=True)
    out.print(url, soft_wrap=True)


def address(flag: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        usage(f"{flag} {text}: write HOST:PORT, such as 127.0.0.1:8443")
    return host.strip("[]") or "0.0.0.0", int(port)


def _check_admin(host: str | None, exposed: bool) -> None:
    with flag_values():
        if host is None and exposed:
            raise ConfigError("--admin-exposed says where --admin may listen: give --admin HOST:PORT, too")
        if host is not None and host not in LOOPBACK and not exposed:
            raise ConfigError(
                f"--admin {host} would show health and metrics in plain HTTP to everybody who reaches it: "
                "listen on 127.0.0.1, or say --admin-exposed"
            )


def _check_tls(
    host: str, cert: str | None, key: str | None, client_ca: str | None, required: bool, insecure: bool
) -> None:
    with flag_values():
        if bool(cert) != bool(key):
            raise ConfigError("--cert and --key go together: give both, or neither")
        if not cert and not insecure:
            raise ConfigError("give --cert and --key, or say --insecure to serve plain HTTP on loopback")
        if insecure and (cert or client_ca):
            raise ConfigError(
                "--insecure is plain HTTP: leave out --cert, --key and --client-ca, or leave out --insecure"
            )
        if insecure and host not in LOOPBACK:
            raise ConfigError(
                f"--insecure would send tokens in clear over the network from {host}: use TLS, or loopback"
            )
        if required and not client_ca:
            raise ConfigError("--require-certificate needs --client-ca: whose certificates count?")
    for path in (cert, key, client_ca):
        if path and not Path(path).is_file():
            raise ConfigError(f"there is no file {path!r}")
