"""Validation of JSON documents by the schemas in reports/schema/, with the package jsonschema."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from gdrkit.harness.needs import host, needs
from gdrkit.install_paths import install_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["JSONSCHEMA", "problems", "unknown_keywords"]

JSONSCHEMA = needs(host.module("jsonschema"))

# Keywords that are no checks of their own.
_ANNOTATIONS = frozenset({"$schema", "$id", "title", "description", "then", "else"})
# Keywords whose value is a schema.
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "propertyNames", "if", "then", "else")


def problems(schema: str, document: object) -> list[str]:
    """Return one line for each violation of a schema, which is a file in reports/schema/."""
    return [f"{error.json_path}: {error.message}" for error in _validator(schema).iter_errors(document)]


@functools.cache
def _validator(schema: str) -> Any:  # noqa: ANN401 - of jsonschema, which has no types.
    from jsonschema import Draft202012Validator

    text = json.loads((install_paths().schemas / schema).read_bytes())
    Draft202012Validator.check_schema(text)
    # JSON Schema ignores a keyword that it does not know, so that a misspelt one would check nothing.
    if unknown := list(unknown_keywords(text)):
        message = f"{schema}: unknown keywords: {', '.join(unknown)}"
        raise ValueError(message)
    return Draft202012Validator(text)


def unknown_keywords(schema: object, path: str = "$") -> Iterator[str]:
    """Yield the path of each keyword, in a schema and the schemas in it, that is not one of JSON Schema."""
    from jsonschema import Draft202012Validator

    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        where = f"{path}.{keyword}"
        if keyword not in Draft202012Validator.VALIDATORS and keyword not in _ANNOTATIONS:
            yield where
        elif keyword in _SCHEMA_KEYWORDS:
            yield from unknown_keywords(value, where)
        elif keyword == "properties":
            for name, part in value.items():
                yield from unknown_keywords(part, f"{where}.{name}")
        elif keyword == "allOf":
            for index, part in enumerate(value):
                yield from unknown_keywords(part, f"{where}[{index}]")
