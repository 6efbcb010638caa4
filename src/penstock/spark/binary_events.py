"""Events that Python reads one by one: what the binary formats have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import StructType


class BinaryFormat(ABC):
    """A format whose bodies are read by a Python library, on executors."""

    schema: StructType

    @property
    @abstractmethod
    def what(self) -> str:
        """What a body should be, in words."""

    @abstractmethod
    def read(self, body: bytes) -> dict[str, Any]:
        """The event; raises whatever the library raises for a body that is none."""

    def column(self, data: Column) -> Column:
        return F.udf(self._event, self.schema, useArrow=False)(data)

    def explain(self, body: bytes) -> str | None:
        try:
            self.read(bytes(body))
        except Exception as exc:  # noqa: BLE001 # whatever a broken body makes the library raise is the reason
            return f"the body is not {self.what}: {exc or type(exc).__name__}"
        return None

    def _event(self, body: bytes) -> dict[str, Any] | None:
        try:
            return self.read(bytes(body))
        except Exception:  # noqa: BLE001 # null makes it a bad record, and `explain` says why
            return None
