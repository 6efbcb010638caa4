"""`penstock ui`: the pages in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from penstock.cli.common import PLATFORM_FILE, Context, err, flag_values, out, sync
from penstock.cli.gateway import address
from penstock.cli.terminal import log_to_stderr
from penstock.errors import ConfigError
from penstock.topology.load import load


@click.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--env", metavar="NAME", help="Environment of the platform file.")
@click.option(
    "--listen", default="127.0.0.1:8222", show_default=True, metavar="HOST:PORT", help="Port 0: any free one."
)
@click.option("--actions", is_flag=True, help="Let operators pause, resume, reset, replay and discard.")
@click.option("--cert", metavar="FILE", help="Certificate of these pages, in PEM form; needed beyond loopback.")
@click.option("--key", metavar="FILE", help="Its key.")
@click.option("--client-ca", metavar="FILE", help="Log in with certificates that this CA has signed.")
@click.option(
    "--tokens",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Log in with tokens: lines of NAME viewer|operator SHA256.",
)
@click.option("--user-header", metavar="NAME", help="A reverse proxy names the person in this header.")
@click.option("--operator", "operators", multiple=True, metavar="NAME", help="May act; repeatable.")
@click.option("--host-name", "hosts", multiple=True, metavar="NAME", help="A name that the pages are asked for under.")
@click.option("--open", "open_it", is_flag=True, help="Open the browser.")
@click.pass_obj
@sync
async def ui(
    context: Context,
    file: Path | None,
    env: str | None,
    listen: str,
    actions: bool,
    cert: str | None,
    key: str | None,
    client_ca: str | None,
    tokens: Path | None,
    user_header: str | None,
    operators: tuple[str, ...],
    hosts: tuple[str, ...],
    open_it: bool,
) -> None:
    """See what flows: streams, consumers, groups, pipelines and dead letters, live in a browser.

    With a platform FILE (with --env alone: penstock.yaml) the pages are laid out by it, and say what is not declared.
    Nothing is changed unless --actions is given. Beyond loopback it needs TLS and a login.

    \b
    Example:
      penstock ui penstock.yaml --open
      penstock ui --listen 0.0.0.0:8222 --cert ui.pem --key ui.key --tokens people.txt --host-name ui.example.org
    """
    try:
        from penstock.ui.access import LOCAL_NAMES, Access, tokens_in
        from penstock.ui.server import Listen, check, serve
    except ImportError as exc:
        raise ConfigError(
            f"the pages need more packages ({exc.name} is missing): pip install 'penstock-nats[ui]'"
        ) from exc
    host, port = address("--listen", listen)
    where = Listen(host=host, port=port, cert=cert, key=key, client_ca=client_ca)
    access = Access(
        actions=actions,
        tokens=tokens_in(tokens) if tokens else {},
        user_header=user_header.lower() if user_header else None,
        operators=frozenset(operators),
        certificates=client_ca is not None,
        hosts=LOCAL_NAMES | {host.lower(), *(name.lower() for name in hosts)},
    )
    with flag_values():
        if bool(cert) != bool(key):
            raise ConfigError("--cert and --key go together: give both, or neither")
        if client_ca and not cert:
            raise ConfigError("--client-ca needs --cert and --key: certificates are asked for in TLS")
        check(where, access)
    platform = load(file or PLATFORM_FILE, env) if file or env else None
    given = platform.environment.settings_overrides() if platform else {}
    log_to_stderr("%(asctime)s %(levelname)s %(name)s %(message)s")

    def ready(url: str) -> None:
        err.print("Ctrl-C stops", soft_wrap=True)
        out.print(url, soft_wrap=True)
        if open_it:
            webbrowser.open(url)

    await serve(context.settings_below_flags(**given), platform, where, access, ready)
