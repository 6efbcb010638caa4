"""Contexts and environment variables of the NATS command line: how people who come from there reach their servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import BadSetting

FIELDS = {
    "url": "servers",
    "creds": "credentials",
    "user": "user",
    "password": "password",
    "token": "token",
    "ca": "tls_ca",
    "cert": "tls_cert",
    "key": "tls_key",
    "tls_first": "tls_first",
    "jetstream_domain": "domain",
    "inbox_prefix": "inbox_prefix",
}
"""Fields of a context, and the settings that they are."""
VARIABLES = {
    "NATS_URL": "servers",
    "NATS_CREDS": "credentials",
    "NATS_USER": "user",
    "NATS_PASSWORD": "password",
    "NATS_TOKEN": "token",
    "NATS_CA": "tls_ca",
    "NATS_CERT": "tls_cert",
    "NATS_KEY": "tls_key",
}


def read(name: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a context; of the selected one, if there is one, without a name. Raises `BadSetting`."""
    folder = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/nonexistent")) / ".config") / "nats"
    chosen = name or _selected(folder)
    if not chosen:
        return {}
    path = folder / "context" / f"{chosen}.json"
    if "/" in chosen or not path.is_file():
        if name is None:  # it was selected, and deleted since
            return {}
        known = ", ".join(sorted(one.stem for one in (folder / "context").glob("*.json"))) or "none"
        raise BadSetting(f"there is no NATS context {chosen!r} in {folder / 'context'}; known are: {known}", "context")
    try:
        values = json.loads(path.read_text())
        found = {setting: values[field] for field, setting in FIELDS.items() if values.get(field)}
    except (OSError, ValueError, AttributeError) as exc:
        raise BadSetting(f"{path} is no NATS context: {exc}", "context") from exc
    return {name: str(Path(value).expanduser()) if _is_path(name) else value for name, value in found.items()}


def from_variables(env: Mapping[str, str]) -> dict[str, Any]:
    """Settings from the variables of the NATS command line."""
    return {setting: env[name] for name, setting in VARIABLES.items() if env.get(name)}


def _selected(folder: Path) -> str:
    try:
        return (folder / "context.txt").read_text().strip()
    except OSError:
        return ""


def _is_path(setting: str) -> bool:
    return setting in ("credentials", "tls_ca", "tls_cert", "tls_key")
