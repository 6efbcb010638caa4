"""Gateways as processes of their own, for tests: certificates, a platform file with grants, and `penstock gateway`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import trustme

from penstock.gateway import GatewayLogin

TOKENS = {name: f"token-of-{name}-0123456789" for name in ("other", "late", "busy", "edge")}


def platform(url: str, consumer: str = "edge_reader", **limits: Any) -> dict[str, Any]:
    """A platform with a stream, readers, and who may call: `edge` by certificate or token, the rest by token.

    `consumer` is what `edge` may read.
    """

    def token(name: str, **more: str) -> dict[str, str]:
        return {"sha256": hashlib.sha256(TOKENS[name].encode()).hexdigest(), **more}

    def reader(filter_: str) -> dict[str, str]:
        return {"stream": "FACTS", "filter": filter_, "ack_wait": "60s", "owner": "tests", "purpose": "to be read"}

    return {
        "environments": {"dev": {"servers": [url]}},
        "streams": {"FACTS": {"subjects": ["facts.>"]}},
        "consumers": {
            consumer: reader("facts.edge.>"),
            **{f"{name}_reader": reader(f"facts.{name}.>") for name in ("edge", "other", "busy")},
        },
        "gateway": {
            "limits": {"page": 50, "body": "64KiB", "rate": 100_000, "wait": "20s", **limits},
            "identities": {
                "edge": {
                    "certificates": ["edge.zone.test"],
                    "tokens": [token("edge")],
                    "consumers": [consumer],
                    "subjects": ["facts.edge.>"],
                },
                "other": {"tokens": [token("other")], "consumers": ["other_reader"], "subjects": ["facts.other.*"]},
                "late": {
                    "tokens": [token("late", expires="2020-01-01T00:00:00Z")],
                    "consumers": ["edge_reader"],
                    "subjects": ["facts.>"],
                },
                "busy": {"tokens": [token("busy")], "consumers": ["busy_reader"], "subjects": ["facts.busy.>"]},
            },
        },
    }


@dataclass(frozen=True)
class Papers:
    """Certificates of callers, good and bad, and the gateway's own."""

    folder: Path

    def __post_init__(self) -> None:
        ca, foreign = trustme.CA(), trustme.CA()
        ca.cert_pem.write_to_path(self.folder / "ca.pem")
        self._issue("gateway", ca.issue_cert("127.0.0.1", "localhost"))
        self._issue("edge", ca.issue_cert("edge.zone.test"))
        self._issue("stranger", ca.issue_cert("stranger.zone.test"))
        self._issue("expired", ca.issue_cert("edge.zone.test", not_after=datetime(2021, 1, 1, tzinfo=UTC)))
        self._issue("foreign", foreign.issue_cert("edge.zone.test"))

    def _issue(self, name: str, issued: trustme.LeafCert) -> None:
        issued.cert_chain_pems[0].write_to_path(self.folder / f"{name}.pem")
        issued.private_key_pem.write_to_path(self.folder / f"{name}.key")

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def login(self, certificate: str | None = None, token: str | None = None) -> GatewayLogin:
        files = (
            (self.folder / f"{certificate}.pem", self.folder / f"{certificate}.key") if certificate else (None, None)
        )
        return GatewayLogin(token=token, ca=self.ca, cert=files[0], key=files[1])

    def flags(self) -> list[str]:
        own = ["--cert", str(self.folder / "gateway.pem"), "--key", str(self.folder / "gateway.key")]
        return [*own, "--client-ca", self.ca]


class RunningGateway:
    """`penstock gateway` as a subprocess; `restart` listens on the same port again."""

    def __init__(
        self,
        file: Path,
        *flags: str,
        listen: str = "127.0.0.1:0",
        admin: str = "127.0.0.1:0",
        descriptors: int | None = None,
    ) -> None:
        """`descriptors`: how many files the process may open."""
        limited = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"] if descriptors else []
        self._command = [*limited, sys.executable, "-m", "penstock", "gateway", str(file), *flags, "--admin", admin]
        self._log = file.with_name(f"gateway-{os.urandom(3).hex()}.log")
        self.url = self.admin = ""
        self._start(listen)

    def _start(self, listen: str) -> None:
        with self._log.open("ab") as log:
            start = log.tell()
            command = [*self._command, "--listen", listen]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()
        assert self.url, self._log.read_text()
        words = self._log.read_text()[start:]
        self.admin = next((line.split()[-1] for line in words.splitlines() if "readiness" in line), "")

    def log(self) -> str:
        """What it wrote to stderr."""
        return self._log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()

    def restart(self) -> None:
        """SIGKILL, and a new one in its place."""
        self.kill()
        self._start(self.url.partition("://")[2])

    def ask_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def look(self, path: str) -> tuple[int, str]:
        """Status and text of a page for operators."""
        try:
            with urllib.request.urlopen(f"{self.admin}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def write_platform(folder: Path, url: str, **choices: Any) -> Path:
    """JSON is YAML."""
    path = folder / f"penstock-{os.urandom(3).hex()}.yaml"
    path.write_text(json.dumps(platform(url, **choices)))
    return path
