"""`penstock server`: the embedded nats-server in the foreground."""

from __future__ import annotations

import click


@click.command()
def server() -> None:
    """Run the embedded nats-server in the foreground."""
