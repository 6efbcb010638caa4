"""The layout as a test: each outside library has one owner, and arrows between packages point inward."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent

OWNERS = {
    "nats": {"broker"},
    "pyspark": {"spark"},
    "deltalake": {"spark"},
    "pyiceberg": {"spark"},
    "click": {"cli"},
    "rich": {"cli"},
    "numba": {"wire"},
    "connectrpc": {"gateway"},
    "pyqwest": {"gateway"},
    "uvicorn": {"web"},
    "starlette": {"ui"},
    "jinja2": {"ui"},
    "protobuf": {"gateway"},
    "yaml": {"topology", "settings", "cli"},
    "pytest": {"testing"},
    "trustme": {"testing"},
}

INNER = {
    "settings",
    "contexts",
    "errors",
    "examples",
    "exports",
    "holds",
    "printable",
    "private",
    "retry",
    "units",
    "subjects",
}
MIDDLE = {"publish", "broker", "web", "wire"}
OUTER = {"spark", "consume", "workers", "facts", "gateway", "sourcing", "deadletter", "topology", "observe", "events"}
EDGE = {"app", "cli", "testing", "bench", "examples", "ui"}
LAYERS = [INNER, MIDDLE, OUTER, EDGE]


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    """The package, or the single module, directly below `penstock`."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def layer_of(package: str) -> int | None:
    return next((level for level, packages in enumerate(LAYERS) if package in packages), None)


def test_each_outside_library_is_imported_from_its_own_package() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}; only {' and '.join(sorted(owners))} may"
        for path in ROOT.rglob("*.py")
        for name in imported_modules(path)
        if (owners := OWNERS.get(name.split(".")[0])) and package_of(path) not in owners
    ]
    assert wrong == []


def test_arrows_between_packages_point_inward() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        own = layer_of(package_of(path))
        for name in imported_modules(path):
            parts = name.split(".")
            other = layer_of(parts[1]) if parts[0] == "penstock" and len(parts) > 1 else None
            if own is not None and other is not None and other > own:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}, which lies further out")
    assert wrong == []


def test_every_package_has_a_place_in_the_layers() -> None:
    packages = {package_of(path) for path in ROOT.rglob("*.py")} - {"__init__", "__main__"}
    assert {package for package in packages if layer_of(package) is None} == set()
