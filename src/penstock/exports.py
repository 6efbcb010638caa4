"""Names that a package offers, imported when they are asked for: a Spark task, or a command, needs few of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package; `where` maps each name to its module, and a submodule to itself."""

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(where[name])
        return module if module.__name__ == f"{package}.{name}" else getattr(module, name)

    return find
