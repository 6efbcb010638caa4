"""A server with the users that `penstock permissions` prints, and what they did there."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.commands import ended

from penstock.errors import AccessDenied, PenstockError
from penstock.server.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.subjects import covered
from penstock.wire import aio

User = dict[str, Any]
"""As a server's configuration has it."""


class Guarded:
    """A server with the users of a platform, and an operator who has made what the platform declares."""

    def __init__(self, server: EmbeddedServer, users: list[User]) -> None:
        self.server = server
        self.users = {one["user"]: one for one in users}
        self.operator = server.settings

    def settings(self, user: str) -> Settings:
        """How a component logs in, and which domain it names."""
        password, inbox = self.users[user]["password"], f"_INBOX_{user.partition(WITHOUT)[0]}"
        return replace(self.operator, user=user, password=password, inbox_prefix=inbox, timeout=5)

    def without_one(self, user: str) -> dict[str, str]:
        """Users who lack one grant of this user each, and which."""
        grants = _grants(self.users[user])
        return {f"{user}{WITHOUT}{number}": grant for number, grant in enumerate(grants)}

    def unused(self, user: str) -> list[str]:
        """The grants that nothing this user has done needs. The server must have been started with `trace`."""
        done = _done(self.server.log.read_text())[user]
        return [grant for grant in _grants(self.users[user]) if not any(covered(one, [grant]) for one in done)]

    def violations(self) -> list[str]:
        """What the server has refused."""
        lines = self.server.log.read_text().splitlines()
        return [line.partition("[ERR]")[2] for line in lines if "Violation" in line]


WITHOUT = "-without-"


def _grants(user: User) -> list[str]:
    allowed = user["permissions"]
    return [*allowed["publish"]["allow"], *allowed["subscribe"]["allow"]]


def _lacking(user: User) -> Iterator[User]:
    """This user as often as it has grants, each time without one of them."""
    for number, grant in enumerate(_grants(user)):
        left = {
            way: {"allow": [one for one in allowed["allow"] if one != grant] or ["none"]}
            for way, allowed in user["permissions"].items()
        }
        yield {**user, "user": f"{user['user']}{WITHOUT}{number}", "permissions": left}


def _done(log: str) -> defaultdict[str, set[str]]:
    """What each user has published to and subscribed to, by the server's trace."""
    who: dict[str, str] = {}
    done: defaultdict[str, set[str]] = defaultdict(set)
    for client, verb, rest in re.findall(r"cid:(\d+) .*<<- \[(CONNECT|H?PUB|SUB) (.*)\]", log):
        if verb == "CONNECT":
            who[client] = json.loads(rest).get("user", "")
        else:
            done[who.get(client, "")].add(rest.split()[0])
    return done


def started(
    folder: Path, file: Path, *more: str, trace: bool = False, lacking: bool = False, domain: str | None = None
) -> Iterator[Guarded]:
    """The server by the command's own file of users. With `lacking` also users who lack one grant each."""
    users, named = folder / "users.json", ["--domain", domain] if domain else []
    ended(*named, "permissions", file, "--env", "dev", "--write", users, *more)
    assert users.stat().st_mode & 0o777 == 0o600
    listed: list[User] = json.loads(users.read_text())["authorization"]["users"]
    if lacking:
        listed += [poorer for one in listed for poorer in _lacking(one)]
    options: dict[str, Any] = {"users": tuple(listed), "user": "operator", "password": "all"}
    with EmbeddedServer(data=folder / "nats", **options, extra="trace: true" if trace else "", domain=domain) as server:
        login = [*named, "--servers", server.url, "--user", "operator", "--password", "all"]
        ended(*login, "apply", file, "--env", "dev")
        ended(*login, "rotate-key")
        yield Guarded(server, listed)


def login(settings: Settings) -> list[str]:
    """How a command logs in; the password is a variable."""
    return ["--servers", ",".join(settings.servers), "--user", settings.user or "", "--inbox-prefix",
            settings.inbox_prefix]  # fmt: skip


async def refused(settings: Settings, subject: str) -> bool:
    async with await aio.connect(settings) as connection:
        try:
            await connection.request(subject, b"{}", timeout=5)
        except AccessDenied:
            return True
        except PenstockError:
            return False
        return False
