"""Where the example platform is: beside the package when installed, in the repository when working on it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from penstock.errors import ConfigError


def example_dir(name: str = "gpuaas") -> Path:
    """The folder of an example."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "_examples" / name, package.parents[1] / "examples" / name):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"the example {name!r} is not installed; it comes with the package and with the repository")


def load_module(path: Path, name: str) -> ModuleType:
    """Import a Python file of an example under the given module name."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
