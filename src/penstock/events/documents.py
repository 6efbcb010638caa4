"""What is in a body: a document by the schema that the platform file has for it, or JSON; and fields of documents."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, Self

from penstock import subjects
from penstock.errors import ConfigError
from penstock.events.avro import AvroReader
from penstock.events.protobuf import ProtobufReader
from penstock.topology.model import PipelineEvent, Platform

log = logging.getLogger(__name__)

MISSING: Any = object()


class DocumentReader(Protocol):
    """Reads bodies of one format."""

    def read(self, body: bytes) -> dict[str, Any]:
        """The event. Raises anything for a body that is none."""


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema, and the messages that it is for."""

    streams: tuple[str, ...]
    subjects: tuple[str, ...]
    """Filters; empty: all subjects."""
    reader: DocumentReader

    def is_for(self, stream: str, subject: str) -> bool:
        return stream in self.streams and (
            not self.subjects or any(subjects.matches(one, subject) for one in self.subjects)
        )


class Documents:
    """Makes documents of bodies. The schemas are those of the platform's pipelines; all else is read as JSON."""

    def __init__(self, schemas: Iterable[Schema] = ()) -> None:
        self._schemas = tuple(schemas)

    @classmethod
    def of(cls, platform: Platform | None) -> Self:
        """With the schemas of a platform file. One that cannot be read is left out, and the log says why."""
        found = []
        for one in platform.pipelines.values() if platform else ():
            try:
                reader = reader_of(one.event, platform.path.parent) if platform else None
            except ConfigError as exc:
                log.warning("messages of pipeline %s are not decoded: %s", one.name, exc)
                continue
            if platform and reader:
                found.append(Schema(platform.streams_read_by(one), one.source.subjects, reader))
        return cls(found)

    def read(self, stream: str, subject: str, body: bytes) -> Any:
        """The document in a body; `MISSING` when there is none that anybody knows how to read."""
        for schema in self._schemas:
            if schema.is_for(stream, subject):
                try:
                    return _json_values(schema.reader.read(body))
                except Exception:  # noqa: BLE001 # whatever a library raises for a body that is not of this schema
                    continue
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return MISSING


def reader_of(event: PipelineEvent, folder: Path) -> DocumentReader | None:
    """The reader for an `event:` block with a binary schema; None where bodies are JSON or text."""
    if event.schema is None or event.format not in ("avro", "protobuf"):
        return None
    file = schema_file(event.schema, folder)
    return (
        AvroReader(file.read_text("utf-8"))
        if event.format == "avro"
        else ProtobufReader(file.read_bytes(), event.message)
    )


def schema_file(name: str, folder: Path) -> Path:
    """A schema beside the platform file. Raises `ConfigError` when it is not there."""
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"event schema: there is no file {str(path)!r}")
    return path


def _json_values(value: Any) -> Any:
    """A decoded event as JSON can hold it: bytes as hexadecimal, times and decimals as text."""
    if isinstance(value, Mapping):
        return {str(name): _json_values(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_json_values(one) for one in value]
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, datetime | date):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def field_of(document: Any, path: str) -> Any:
    """What lies at a path such as `payload.items.0.id`; `MISSING` where there is nothing."""
    for part in path.split("."):
        if isinstance(document, dict) and part in document:
            document = document[part]
        elif isinstance(document, list) and part.isdecimal() and int(part) < len(document):
            document = document[int(part)]
        else:
            return MISSING
    return document


def field_text(value: Any) -> str:
    """The value of a field as one writes it into a filter."""
    if value is MISSING:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class FieldFilter:
    """`payload.id`: the field is there; `payload.id=7`: it has that value."""

    path: str
    value: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        path, equals, value = text.partition("=")
        return cls(path.strip(), value.strip() if equals else None)

    def matches(self, document: Any) -> bool:
        found = field_of(document, self.path)
        return found is not MISSING and (self.value is None or field_text(found) == self.value)
