"""`penstock permissions`: what each component of a platform must be allowed on the server."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import click

from penstock.cli.common import EXIT_OK, Context, json_option, out, print_json, table, usage
from penstock.cli.errors_json import reported
from penstock.cli.platform import env_option, file_argument
from penstock.cli.terminal import echo
from penstock.errors import ConfigError
from penstock.printable import json_text
from penstock.private import write_private
from penstock.topology.load import load
from penstock.topology.permissions import Permissions, of_bridge, of_group, permissions

FORMS = ("table", "server", "jwt")


@click.command("permissions")
@file_argument
@env_option
@click.option("--service", metavar="NAME", help="Only this user, by its name in the output.")
@click.option("--group", "groups", multiple=True, metavar="NAME=STREAM[:DLQ]",
              help="Also the workers of this group, and where their dead letters go; repeatable.")  # fmt: skip
@click.option("--bridge", "bridges", multiple=True, metavar="NAME=FROM:TO",
              help="Also a bridge between these streams; repeatable.")  # fmt: skip
@click.option("--form", type=click.Choice(FORMS), default="table", show_default=True,
              help="For people, for a server's configuration, or the claims of JWTs.")  # fmt: skip
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write the server form, with new passwords, for `penstock server --users`.")  # fmt: skip
@json_option
@click.pass_obj
@reported
def permissions_command(
    context: Context,
    file: str,
    env: str | None,
    service: str | None,
    groups: tuple[str, ...],
    bridges: tuple[str, ...],
    form: str,
    write: Path | None,
    as_json: bool,
) -> int:
    """Print what each service, group, pipeline and the gateway of the platform FILE must be allowed, and no more.

    Groups that the file does not declare, and bridges, are named here. Each is a user of its own, whose
    `inbox_prefix` is `_INBOX_` and its name.

    \b
    Example:
      penstock permissions penstock.yaml --form server
      penstock permissions penstock.yaml --service billing-worker --form jwt
      penstock permissions penstock.yaml --group billing=BILLING:dlq.billing --write users.json
    """
    platform = load(file, env)
    domain = context.settings_below_flags(**platform.environment.settings_overrides()).domain
    found = permissions(platform, domain)
    for name, stream, dlq in (_parts("--group", text) for text in groups):
        found.append(of_group(platform, name, stream, dlq or None, domain))
    for name, origin, destination in (_parts("--bridge", text) for text in bridges):
        found.append(of_bridge(platform, name, origin, destination or usage("--bridge is NAME=FROM:TO"), domain))
    found = _chosen(found, service)
    if write:
        users = [one.to_user(secrets.token_urlsafe(24)) for one in found]
        write_private(write, _server(users))
        out.print(f"wrote {write}: {len(users)} users, each with a password", markup=False, soft_wrap=True)
    elif as_json:
        print_json({"version": 1, "users": [one.to_json() for one in found]})
    elif form == "server":
        echo(_server([one.to_user() for one in found]), newline=False)
    elif form == "jwt":
        echo(json_text([one.to_claims() for one in found], indent=2))
    else:
        for one in found:
            rows = [("publish", subject) for subject in one.publish]
            rows += [("subscribe", subject) for subject in one.subscribe]
            out.print(table(f"{one.user} ({one.kind})", ["", ("subject", "name")], rows), "")
    return EXIT_OK


def _parts(flag: str, text: str) -> tuple[str, str, str]:
    name, _, rest = text.partition("=")
    first, _, second = rest.partition(":")
    if not (name and first):
        usage(f"{flag} {text}: a name, `=` and a stream")
    return name, first, second


def _chosen(found: list[Permissions], name: str | None) -> list[Permissions]:
    chosen = [one for one in found if name in (None, one.user)]
    if not chosen:
        known = ", ".join(one.user for one in found) or "none"
        raise ConfigError(f"there is no user {name!r}; there are {known}")
    return chosen


def _server(users: list[dict[str, object]]) -> str:
    """JSON, which a server's configuration may be."""
    # A server's configuration does not know the escapes of JSON for letters beyond ASCII.
    return json.dumps({"authorization": {"users": users}}, indent=2, ensure_ascii=False) + "\n"
