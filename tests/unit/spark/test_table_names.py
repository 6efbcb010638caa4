"""How the files of a table are told apart."""

from __future__ import annotations

import pytest

from penstock.spark.tables import _number

ID = "1b4e28ba-2fa1-11d2-883f-c31375681409"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (f"part-00000-{ID}-c000.snappy.parquet", ""),
        (f"part-00000-{ID}.c000.snappy.parquet", ""),
        (f"part-00003-{ID}.c002.json.gz", "-002"),
        (f"part-00003-{ID}-c1200.json", "-1200"),
    ],
)
def test_the_number_of_a_file_is_not_taken_from_its_id(name: str, number: str) -> None:
    assert _number(f"t/day=1/{name}") == number
