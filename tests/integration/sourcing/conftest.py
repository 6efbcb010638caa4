"""A hub and a leaf of it, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing import LeafPair, leaf_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeafPair]:
    with leaf_pair(tmp_path_factory.mktemp("pair")) as made:
        yield made
