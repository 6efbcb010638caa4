"""`module:function` of a platform file, found beside it and sent to executors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError


def load_function(reference: str, folder: Path) -> Callable[..., Any]:
    """The function that `module:function` names; modules in `folder` win over installed ones."""
    module_name, separator, name = reference.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{reference!r} does not name a function; write module:function")
    module = load_module(module_name, folder)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{reference!r}: {module.__file__ or module_name} has no function {name!r}")
    function: Callable[..., Any] = found
    return function


def load_module(name: str, folder: Path) -> ModuleType:
    """Import a module by name, looking into `folder` first."""
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != name.split(".")[0] and exc.name != name:
            raise ConfigError(f"module {name!r} needs {exc.name!r}, which is not installed") from exc
        raise ConfigError(f"there is no module {name!r}, neither in {where} nor installed") from exc


def module_files(reference: str, folder: Path) -> Path | None:
    """The file or package folder of a function's module when it lies in `folder`: what executors must be sent."""
    root = reference.partition(":")[0].split(".")[0]
    for candidate in (folder / f"{root}.py", folder / root):
        if candidate.exists():
            return candidate
    return None
