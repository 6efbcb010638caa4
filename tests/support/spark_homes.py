"""Homes of Spark: folders of links to the installed PySpark."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def installed() -> Path:
    """The folder of PySpark; found without importing it, which takes half a second."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None, "PySpark is missing: install penstock-nats[spark]"
    return Path(found.origin).parent


def linked_home(folder: Path, *without: str) -> Path:
    """Spark under another folder, except for these entries."""
    folder.mkdir(exist_ok=True)
    for entry in installed().iterdir():
        if entry.name not in without:
            (folder / entry.name).symlink_to(entry)
    return folder


def unzipped_home(folder: Path) -> Path:
    """Spark whose Python processes import the installed PySpark, and not the zip file of the same that Spark has.

    What comes from a zip file is compiled anew by every process, which doubles the time that a streaming query takes
    to start.
    """
    home, libraries = linked_home(folder, "python"), installed() / "python" / "lib"
    (home / "python" / "lib").mkdir(parents=True)
    for entry in (installed() / "python").iterdir():
        if entry.name != "lib":
            (home / "python" / entry.name).symlink_to(entry)
    for entry in libraries.iterdir():
        target = installed().parent if entry.name == "pyspark.zip" else entry
        (home / "python" / "lib" / entry.name).symlink_to(target)
    return home
