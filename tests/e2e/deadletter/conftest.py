"""The same stage as in the integration tests."""

from __future__ import annotations

from tests.integration.deadletter.conftest import stage

__all__ = ["stage"]
