"""Every page with examples has a test that runs them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_page_has_examples_that_nobody_runs() -> None:
    pages = [path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "```python" in path.read_text()]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    assert len(pages) > 5
    assert [page.name for page in pages if f'{page.name}"' not in tests] == []
