"""The part of JSON Schema that the schemas of this project use, so that cases need no further package."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["problems"]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}
_KNOWN = {
    *("$schema", "$id", "title", "description", "type", "const", "enum", "required", "properties", "propertyNames"),
    *("additionalProperties", "items", "pattern", "minimum", "minLength", "minItems", "maxItems", "maxProperties"),
    *("allOf", "if", "then", "else"),
}


def problems(schema: dict[str, Any], value: object, where: str = "$") -> Iterator[str]:
    """What of `value` is not as `schema` says; nothing when all is."""
    unknown = schema.keys() - _KNOWN
    if unknown:
        message = f"the schema at {where} uses {sorted(unknown)}, which are not understood here"
        raise NotImplementedError(message)
    yield from _simple(schema, value, where)
    if isinstance(value, dict):
        yield from _object(schema, value, where)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from problems(schema["items"], item, f"{where}[{index}]")
    for part in schema.get("allOf", ()):
        yield from problems(part, value, where)
    if "if" in schema:
        branch = "else" if any(problems(schema["if"], value, where)) else "then"
        yield from problems(schema.get(branch, {}), value, where)


def _simple(schema: dict[str, Any], value: object, where: str) -> Iterator[str]:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # To Python a bool is an int; to JSON it is none.
    if kinds and not any(
        isinstance(value, _TYPES[kind]) and not (isinstance(value, bool) and kind in ("integer", "number"))
        for kind in kinds
    ):
        yield f"{where} is no {' or '.join(kinds)}: {value!r}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is none of {schema['enum']}: {value!r}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where} does not match {schema['pattern']}: {value!r}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        yield f"{where} is below {schema['minimum']}"
    if isinstance(value, str | list) and len(value) < schema.get("minLength", schema.get("minItems", 0)):
        yield f"{where} is too short"
    if isinstance(value, list | dict) and len(value) > schema.get("maxItems", schema.get("maxProperties", len(value))):
        yield f"{where} has too many"


def _object(schema: dict[str, Any], value: dict[str, Any], where: str) -> Iterator[str]:
    known = schema.get("properties", {})
    yield from (f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value)
    more = schema.get("additionalProperties", True)
    for name, item in value.items():
        yield from problems(schema.get("propertyNames", {}), name, f"{where}.{name}")
        if name in known:
            yield from problems(known[name], item, f"{where}.{name}")
        elif more is False:
            yield f"{where} has {name}"
        elif isinstance(more, dict):
            yield from problems(more, item, f"{where}.{name}")
