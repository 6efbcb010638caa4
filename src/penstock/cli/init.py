"""`penstock init`: five questions, and a project that runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from penstock.cli.common import EXIT_OK, Context, out, usage
from penstock.cli.project import FILES
from penstock.errors import ConfigError
from penstock.settings import check_url

SERVER = "nats://127.0.0.1:4222"
RESERVED = ("dlq", "handled", "penstock")
"""First tokens of subjects that mean something else in the project."""


@dataclass(frozen=True, slots=True)
class ProjectAnswers:
    """What the project is about."""

    name: str
    servers: str
    stream: str
    subject: str
    owner: str

    def values(self) -> dict[str, str]:
        """What stands in the files, by its name in the templates."""
        tokens = self.subject.split(".")
        domain, event = plain(tokens[0]), plain(tokens[-1])
        return {
            "name": self.name,
            "servers": ", ".join(f'"{one.strip()}"' for one in self.servers.split(",")),
            "urls": ",".join(one.strip() for one in self.servers.split(",")),
            "stream": self.stream,
            "captured": f"{tokens[0]}.>" if len(tokens) > 1 else self.subject,
            "subject": self.subject,
            "results": f"{self.stream}_HANDLED",
            "consumer": f"{plain(self.name)}_{event}",
            "dlq": f"dlq.{domain}.{event}",
            "owner": self.owner,
        }


def plain(text: str) -> str:
    """Text as part of a name: lower case, with _ for whatever a name cannot have."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "events"


@click.command("init")
@click.argument("directory", default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--name", metavar="NAME", help="Name of the service.  [default: the directory's]")
@click.option("--stream", metavar="NAME", help="Stream that its events are in.  [default: EVENTS]")
@click.option("--subject", metavar="SUBJECT", help="Subject of the events that it handles.  [default: from the stream]")
@click.option("--owner", metavar="TEAM", help="Who answers for it.  [default: my-team]")
@click.option("--yes", is_flag=True, help="Ask nothing: what is not given has its default.")
@click.pass_obj
def init(context: Context, /, directory: Path, yes: bool, **given: Any) -> int:
    """Write a project that runs: a platform file, a service with a handler, a test, and a README.

    Asks five questions, unless --yes; each has a flag (the servers are --servers). What is there already is left alone.

    \b
    Example:
      penstock init shop --stream ORDERS --subject orders.placed --yes
    """

    def answer(question: str, value: str | None, default: str) -> str:
        return value or (default if yes else str(click.prompt(question, default=default, err=True)))

    folder = directory.resolve()
    name = answer("Name of the service", given["name"], plain(folder.name).replace("_", "-"))
    servers = answer("Servers", context.connection.get("servers"), SERVER)
    stream = answer("Stream that its events are in", given["stream"], "EVENTS")
    subject = answer("Subject of the events that it handles", given["subject"], f"{plain(stream)}.created")
    owner = answer("Team that answers for it", given["owner"], "my-team")
    answers = ProjectAnswers(name, servers, stream, subject, owner)
    _check(answers)
    _write(folder, answers)
    _tell(directory, list(FILES))
    return EXIT_OK


def _check(answers: ProjectAnswers) -> None:
    for what, name in (("service", answers.name), ("stream", answers.stream)):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            usage(f"{name!r} cannot be the name of a {what}: use letters, digits, _ and -")
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", answers.subject):
        usage(f"{answers.subject!r} cannot be the subject of an event: use letters, digits, _ and -, with dots between")
    first = answers.subject.split(".")[0]
    if first in RESERVED:
        usage(
            f"{answers.subject!r}: subjects that begin with {first!r} have another use in the project; choose another"
        )
    for url in answers.servers.split(","):
        try:
            check_url(url.strip())
        except ConfigError as exc:
            usage(str(exc))
    if re.search(r"[\n\"]", answers.owner):
        usage("the name of a team is one line without quotes")


def _write(folder: Path, answers: ProjectAnswers) -> None:
    """Write all files, or none where one of them is there."""
    taken = [name for name in FILES if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{folder} has {' and '.join(taken)} already: nothing was written; name another directory")
    folder.mkdir(parents=True, exist_ok=True)
    for name, template in FILES.items():
        (folder / name).write_text(_filled(template, answers.values()), encoding="utf-8")


def _filled(template: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        template = template.replace(f"<<{name}>>", value)
    return template


def _tell(directory: Path, names: list[str]) -> None:
    where = "" if directory == Path() else f" in {directory}"
    out.print(f"wrote {', '.join(names)}{where}; the README says how to run it", markup=False, soft_wrap=True)
