"""`penstock lint` and `penstock asyncapi`: look over a platform file, and write it as an AsyncAPI document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from rich.table import Table

from penstock.cli import errors_json
from penstock.cli.common import EXIT_ATTENTION, EXIT_OK, json_option, out, show_result, table
from penstock.cli.terminal import Text, echo
from penstock.topology import asyncapi as asyncapi_document
from penstock.topology.catalog import Catalog, ConsumerRow, catalog
from penstock.topology.lint import count, lint
from penstock.topology.load import load
from penstock.topology.lock import Lock, lock_of, lock_path, read_lock, write_lock
from penstock.topology.model import Platform
from penstock.topology.rules import Finding, Severity
from penstock.units import counted

COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}

platform_argument = click.argument("file", default="penstock.yaml", type=click.Path(path_type=Path))
environment_option = click.option(
    "--env", metavar="NAME", help="Environment of the file.  [default: the only one, dev]"
)


@click.command("lint")
@platform_argument
@environment_option
@click.option("--strict", is_flag=True, help="Exit 2 for warnings too.")
@click.option("--catalog", "show_catalog", is_flag=True, help="Print the tables of streams, consumers and services.")
@click.option("--update-lock", is_flag=True, help="Accept today's names: write the lock file next to FILE.")
@json_option
def lint_command(
    file: Path, env: str | None, strict: bool, show_catalog: bool, update_lock: bool, as_json: bool
) -> int:
    """Look over a platform file without asking any server.

    Exits 0 when there are no errors, 2 when there are. docs/lint.md explains every code.

    \b
    Example:
      penstock lint examples/gpuaas/penstock.yaml
      penstock lint examples/gpuaas/penstock.yaml --env prod --catalog
    """
    with errors_json.told(as_json):
        platform = load(file, env)
        if update_lock:
            write_lock(lock_path(file), lock_of(platform))
        lock = read_lock(lock_path(file))
    findings = lint(platform, lock)
    show_result(
        as_json,
        _report(platform, findings, show_catalog),
        lambda: _print(platform, findings, lock if update_lock else None, show_catalog),
    )
    failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return EXIT_ATTENTION if any(f.severity in failing for f in findings) else EXIT_OK


def _report(platform: Platform, findings: list[Finding], with_catalog: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "file": str(platform.path),
        "environment": platform.environment.name,
        "counts": count(findings),
        "findings": [finding.to_json() for finding in findings],
    }
    return report | ({"catalog": catalog(platform).to_json()} if with_catalog else {})


def _print(platform: Platform, findings: list[Finding], written: Lock | None, with_catalog: bool) -> None:
    if with_catalog:
        _print_catalog(catalog(platform))
    if findings:
        out.print(findings_table(findings))
    if written:
        names = f"{counted(len(written.streams), 'stream')}, {counted(len(written.consumers), 'consumer')}"
        out.print(f"wrote {lock_path(platform.path)}: {names}", soft_wrap=True)
    tally = ", ".join(counted(number, word) for word, number in _tally(findings))
    where = f"{platform.path} ({platform.environment.name})"
    out.print(f"{where}: {tally}" if tally else f"{where}: clean", soft_wrap=True)


def findings_table(findings: Sequence[Finding]) -> Table:
    rows = [(f.code, Text(f.severity, COLOURS[f.severity]), f.line, f.message, f.fix) for f in findings]
    return table(None, ["Code", "Severity", ("Line", "right"), "What", "Fix"], rows)


def _tally(findings: list[Finding]) -> list[tuple[str, int]]:
    words = {"info": "note"}
    return [(words.get(name, name), number) for name, number in count(findings).items() if number]


def _print_catalog(tables: Catalog) -> None:
    heads = ["Stream", "Subjects", "Retention", "Storage", "Max age", "Max bytes", "Discard"]
    rows = [
        (
            r.stream,
            "\n".join(r.subjects),
            r.retention,
            r.storage,
            r.max_age,
            r.max_bytes,
            r.discard,
            r.replicas,
            r.consumers,
        )
        for r in tables.streams
    ]
    out.print(table("Streams", [*heads, ("Repl.", "right"), ("Cons.", "right")], rows), "")
    for stream in tables.streams:
        mine = [row for row in tables.consumers if row.stream == stream.stream]
        if mine:
            heads = ["Consumer, filters, dead letters", "Service", "Ack", "Max", "From"]
            cells = [(_names(row), row.service, row.ack_wait, row.max_deliver, row.deliver) for row in mine]
            out.print(table(f"Consumers of {stream.stream}", heads, cells), "")
    services = [*tables.services, ("total", len(tables.consumers))]
    out.print(table("Consumers by service", ["Service", ("Consumers", "right")], services), "")


def _names(row: ConsumerRow) -> str:
    """A consumer's name with its subjects below it: side by side they would not fit."""
    return "\n".join((row.consumer, *(f"  {one}" for one in row.filters), *([f"  → {row.dlq}"] if row.dlq else [])))


@click.command("asyncapi")
@platform_argument
@environment_option
@click.option("--out", "target", type=click.Path(path_type=Path), help="Write here; a name ending in .json gets JSON.")
@click.option("--title", help="Title of the document.  [default: the folder of FILE]")
@click.option("--version", "version", default="1.0.0", show_default=True, help="Version of the described platform.")
@json_option
def asyncapi_command(
    file: Path, env: str | None, target: Path | None, title: str | None, version: str, as_json: bool
) -> int:
    """Write a platform file as an AsyncAPI 3.0 document.

    \b
    Example:
      penstock asyncapi examples/gpuaas/penstock.yaml --out asyncapi.yaml
    """
    document = asyncapi_document.document(load(file, env), title, version)
    wants_json = as_json or (target is not None and target.suffix == ".json")
    text = json.dumps(document, indent=2) + "\n" if wants_json else yaml.safe_dump(document, sort_keys=False, width=120)
    if target is None:
        echo(text, newline=False)
        return EXIT_OK
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise click.ClickException(f"cannot write {str(target)!r}: {exc.strerror}") from exc
    out.print(f"wrote {target}: {len(document['channels'])} channels, {len(document['operations'])} operations")
    return EXIT_OK
