"""Columns that a pack may have, and the id that names them. Pure.

Every value of an allowed type takes up room in a buffer. So the size of a pack bounds what can be made of it: types
whose values need none (nulls, structs without fields, binaries of width 0), or that are expanded (dictionaries, run
ends), are refused.
"""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import blake2b

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.packs.marks import MalformedPack

HEADERS_TYPE = pa.map_(pa.string(), pa.list_(pa.field("element", pa.string())))
"""A map of lists: names in the order they came, each with all of its values."""
DATA = pa.field("data", pa.binary(), nullable=False)
ROW_FIELDS = (
    DATA,
    pa.field("subject", pa.string()),
    pa.field("headers", HEADERS_TYPE),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
)
"""Columns of a pack of kind `rows`, in this order. All but `data` may be missing, and may have nulls."""

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_PLAIN = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)


@lru_cache(maxsize=256)
def schema_id(schema: pa.Schema) -> str:
    """Names the columns, their types and whether they may be null. Raises `ConfigError` for what no pack may have."""
    return blake2b(_fields_text(schema).encode(), digest_size=8).hexdigest()


def checked_schema(schema: pa.Schema) -> pa.Schema:
    """The schema without metadata. Raises `ConfigError` unless a typed pack may have these columns."""
    if not len(schema):
        raise ConfigError("a pack needs a column: this table has none")
    plain = schema.remove_metadata()
    schema_id(plain)
    return plain


@lru_cache(maxsize=64)
def row_schema_problem(schema: pa.Schema) -> str:
    """What is wrong with the columns of a pack of kind `rows`; empty when they are as they should be."""
    wanted = [field for field in ROW_FIELDS if field.name in schema.names]
    return "" if DATA in wanted and schema.equals(pa.schema(wanted)) else f"its columns are {_short(schema)}"


def _short(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in list(schema)[:8])


def _fields_text(fields: pa.Schema | list[pa.Field]) -> str:
    names = [field.name for field in fields]
    if len(set(names)) < len(names):
        raise ConfigError(f"a pack cannot have two columns of one name: {', '.join(sorted(names))}")
    return ",".join(_field_text(field) for field in fields)


def _field_text(field: pa.Field) -> str:
    return f"{json.dumps(field.name)}:{_type_text(field.name, field.type)}{'' if field.nullable else '!'}"


def _type_text(name: str, kind: pa.DataType) -> str:
    if any(check(kind) for check in _PLAIN) or (pa.types.is_fixed_size_binary(kind) and kind.byte_width):
        return str(kind)
    fixed = kind.list_size if pa.types.is_fixed_size_list(kind) else None
    if any(check(kind) for check in _LISTS) and fixed != 0:
        size = f"[{fixed}]" if fixed else ""
        large = "large_" if pa.types.is_large_list(kind) else ""
        nullable = "" if kind.value_field.nullable else "!"
        return f"{large}list{size}<{_type_text(name, kind.value_type)}{nullable}>"
    if pa.types.is_map(kind):
        return f"map<{_type_text(name, kind.key_type)},{_type_text(name, kind.item_type)}>"
    if pa.types.is_struct(kind) and kind.num_fields:
        return f"struct<{_fields_text(list(kind))}>"
    raise ConfigError(f"column {name!r} of type {kind} cannot be packed; cast it to a plain type first")


def portable(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in types that Spark has: times in microseconds, and in UTC where they have a zone; short offsets.

    Nanoseconds are cut off. Whoever wants to keep them reads the batch itself.
    """
    schema = pa.schema([_portable_field(field) for field in batch.schema])
    return batch if schema.equals(batch.schema) else batch.cast(schema, safe=False)


def _portable_field(field: pa.Field) -> pa.Field:
    return field.with_type(portable_type(field.type))


def portable_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column in `portable`."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(_portable_field(kind.key_field), _portable_field(kind.item_field))
    if any(check(kind) for check in _LISTS):
        return pa.list_(_portable_field(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_portable_field(field) for field in kind])
    return kind


def check_read_schema(schema: pa.Schema) -> None:
    """Raise `MalformedPack` when columns that came in a pack are none that a pack may have."""
    try:
        schema_id(schema)
    except ConfigError as exc:
        raise MalformedPack(str(exc)) from None
