"""What Penstock promises to Python programs: few names, documented on one page, from few places."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import penstock

ROOT = Path(__file__).resolve().parents[2]
PLACES = {"penstock", "penstock.publish", "penstock.spark", "penstock.testing", "penstock.workers"}
IMPORT = re.compile(r"^\s*(?:from\s+(penstock[\w.]*)\s+import\s+\(?([^)\n]*)|import\s+(penstock[\w.]*))", re.MULTILINE)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_there_are_few_names_and_all_of_them_are_there() -> None:
    assert len(penstock.__all__) <= 25
    assert sorted(penstock.__all__) == penstock.__all__
    assert [name for name in penstock.__all__ if getattr(penstock, name, None) is None] == []


def test_every_name_is_documented_on_one_page() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    table = text.partition("| name | what it is |")[2].partition("\n\n")[0]
    named = set(
        re.findall(r"`(\w+)(?:\(\w*\))?`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line))
    )
    assert named == set(penstock.__all__)


def test_the_documentation_imports_from_five_places_at_most() -> None:
    found = {
        module or whole
        for page in pages()
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for module, _, whole in IMPORT.findall(code)
    }
    assert found <= PLACES
    assert len(found) <= 5


def test_what_the_documentation_imports_is_promised_there() -> None:
    wrong = []
    for page in pages():
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for module, names, _ in IMPORT.findall(code):
                offered = importlib.import_module(module).__all__ if module else ()
                wrong += [(page.name, module, n) for n in re.findall(r"\w+", names) if n not in offered]
    assert wrong == []


def test_what_a_package_offers_is_there() -> None:
    for place in sorted(PLACES):
        module = importlib.import_module(place)
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
