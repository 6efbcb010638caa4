"""The layout as a test: packages are ordered, imports point downward, each outside library has its owner."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
DESIGN = Path(__file__).resolve().parents[2] / "DESIGN.md"

ORDER = [
    # modules without a package
    "errors",
    "exports",
    "holds",
    "private",
    "printable",
    "units",
    "subjects",
    "coroutines",
    "retry",
    "records",
    "examples",
    "contexts",
    "settings",
    # what is said to a server, and the server
    "wire",
    "packs",
    "jetstream",
    "server",
    "web",
    "metrics",
    "publish",
    # what is done with messages
    "deadletter",
    "consume",
    "workers",
    "facts",
    "sourcing",
    "topology",
    "events",
    "spark",
    "observe",
    "gateway",
    # the faces
    "app",
    "ui",
    "testing",
    "cli",
    "__main__",
]
"""Packages and modules of `penstock` from the bottom to the top: each may import what stands before it."""

TO_MEND: dict[tuple[str, str], str] = {}
"""Imports against the order that are known. Remove a line here once the import is gone."""

OWNERS = {
    "click": {"cli"},
    "connectrpc": {"gateway"},
    "deltalake": {"spark"},
    "fastavro": {"events"},
    "google": {"events"},
    "jinja2": {"ui"},
    "llvmlite": {"wire"},
    "markupsafe": {"ui"},
    "msgspec": {"app"},
    "nkeys": {"wire"},
    "numba": {"wire"},
    "numpy": {"wire", "spark"},  # offsets of Arrow columns: those that are scanned, and those that Spark hands out
    "prometheus_client": {"metrics"},
    "protobuf": {"gateway"},
    "py4j": {"spark"},
    "pyarrow": {"wire", "packs", "spark"},  # columns from received bytes; packs of rows; columns for Spark
    "pydantic": {"app"},
    "pyiceberg": {"spark"},
    "pyqwest": {"gateway"},
    "pyspark": {"spark"},
    "pytest": {"testing"},
    "rich": {"cli"},
    "sqlalchemy": {"spark"},
    "starlette": {"ui"},
    "trustme": {"testing"},
    "uvicorn": {"web"},
    "yaml": {"settings", "topology", "cli"},  # the settings file; the platform file; documents that are printed
}
"""Every outside library, and the packages that may import it."""


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    """The package, or the single module, directly below `penstock`."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports() -> Iterator[tuple[Path, str, str, str]]:
    """Every import: the file, its package, the top of what it imports, and the package of `penstock` or ''."""
    for path in sorted(ROOT.rglob("*.py")):
        for name in imported_modules(path):
            top, _, rest = name.partition(".")
            yield path.relative_to(ROOT), package_of(path), top, rest.split(".")[0] if top == "penstock" else ""


def test_each_outside_library_is_imported_from_its_own_package() -> None:
    wrong = [
        f"{path} imports {top}; only {' and '.join(sorted(OWNERS[top]))} may"
        for path, own, top, _ in imports()
        if top in OWNERS and own not in OWNERS[top]
    ]
    assert wrong == []


def test_every_outside_library_has_an_owner_and_no_owner_is_idle() -> None:
    used: dict[str, set[str]] = {}
    for _, own, top, _ in imports():
        if top != "penstock" and top not in sys.stdlib_module_names:
            used.setdefault(top, set()).add(own)
    assert used == OWNERS


def test_imports_point_downward() -> None:
    rank = {package: index for index, package in enumerate(ORDER)}
    upward = {
        (own, other): path
        for path, own, _, other in imports()
        if other in rank and own in rank and rank[other] > rank[own]
    }
    assert {pair: str(path) for pair, path in upward.items() if pair not in TO_MEND} == {}
    assert upward.keys() >= TO_MEND.keys(), "an import that is listed in TO_MEND is gone: remove its line"


def test_the_order_names_every_package_and_nothing_else() -> None:
    packages = {package_of(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert sorted(ORDER) == sorted(packages)


def test_the_map_in_the_design_has_the_same_order() -> None:
    drawn = DESIGN.read_text().partition("src/penstock/\n")[2].partition("\nsrc/")[0]
    assert re.findall(r"^  (\w+)(?:/|\.py) ", drawn, re.MULTILINE) == [name for name in ORDER if name != "__main__"]


def test_workers_stay_in_their_rooms() -> None:
    """They had 57 modules in one folder once."""
    modules = list((ROOT / "workers").rglob("*.py"))
    assert {path.parent.name for path in modules} == {"workers", "pull", "dispatch", "group"}
    assert len(modules) <= 25
