"""Metadata keys that Penstock sets on streams and consumers."""

from __future__ import annotations

from typing import Final

PLATFORM: Final = "penstock.platform"
"""The platform that created or adopted the resource; only that platform may prune it."""
DECLARED: Final = "penstock.declared"
"""The fields that the platform declared last time."""
SERVICE: Final = "penstock.service"
"""The service that reads through a consumer."""
DLQ: Final = "penstock.dlq"
"""Where a consumer's dead letters go."""
SOURCING: Final = "penstock.sourcing"
"""The stream that reads through a consumer which Penstock keeps for it."""
QUERY: Final = "penstock.query"
"""The Spark query whose position a consumer holds."""
RENAMED_FROM: Final = "penstock.renamed_from"
"""The former name of a consumer that was created where the one of that name had come to."""
OWNER: Final = "penstock.owner"
PURPOSE: Final = "penstock.purpose"
READER: Final = "penstock.reader"
"""Whether a consumer's named reader is `dedicated` (one page at a time, in order) or `shared`."""
