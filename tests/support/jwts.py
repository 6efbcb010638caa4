"""Logins of a server in operator mode: keys, and JWTs that these sign."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

import nkeys

NO_LIMITS = {
    **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1),
    **dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1),
    "wildcards": True,
}


def key(prefix: int) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(secrets.token_bytes(32), prefix))


def public(of: nkeys.KeyPair) -> str:
    return bytes(of.public_key).decode()


def signed(claims: dict[str, Any], subject: nkeys.KeyPair, issuer: nkeys.KeyPair) -> str:
    """A JWT as `nsc` makes it of claims."""
    body = {"iat": int(time.time()), "iss": public(issuer), "sub": public(subject), **claims}
    body["jti"] = base64.b32encode(hashlib.sha256(_json(body)).digest()).decode().rstrip("=")
    head = f"{_encoded(_json({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_encoded(_json(body))}"
    return f"{head}.{_encoded(issuer.sign(head.encode()))}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class OperatorMode:
    """An operator with a system account, and an account whose users the tests make."""

    def __init__(self) -> None:
        self._operator, self._system = key(nkeys.PREFIX_BYTE_OPERATOR), key(nkeys.PREFIX_BYTE_ACCOUNT)
        self._account = key(nkeys.PREFIX_BYTE_ACCOUNT)

    def config(self) -> str:
        """Lines of a server's configuration, with a resolver in memory."""
        operator = signed({"name": "op", "nats": {"type": "operator", "version": 2}}, self._operator, self._operator)
        limited = {"name": "apps", "nats": {"type": "account", "version": 2, "limits": NO_LIMITS}}
        system = {"name": "sys", "nats": {"type": "account", "version": 2, "limits": NO_LIMITS | NO_STORAGE}}
        accounts = {
            public(self._account): signed(limited, self._account, self._operator),
            public(self._system): signed(system, self._system, self._operator),
        }
        preloaded = "\n".join(f'  {name}: "{jwt}"' for name, jwt in accounts.items())
        return (
            f'operator: "{operator}"\nsystem_account: {public(self._system)}\nresolver: MEMORY\n'
            f"resolver_preload: {{\n{preloaded}\n}}\n"
        )

    def credentials(self, file: Path, claims: dict[str, Any]) -> Path:
        """A `.creds` file of a new user of the account."""
        user = key(nkeys.PREFIX_BYTE_USER)
        jwt = signed(claims, user, self._account)
        seed = bytes(user.seed).decode()
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
        file.chmod(0o600)
        return file


NO_STORAGE = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), 0)
