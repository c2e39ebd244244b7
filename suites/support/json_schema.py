"""Validation of JSON documents with the schemas in reports/schema/, by the Python package jsonschema."""

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

# Keywords without a check of their own in jsonschema: they are annotations, or the check of `if` uses them.
_ANNOTATIONS = frozenset({"$schema", "$id", "title", "description", "then", "else"})
# Keywords whose value is a schema.
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "propertyNames", "if", "then", "else")


def problems(schema: str, document: object) -> list[str]:
    """Return one line for each violation of the schema by the document. `schema` is a file name in reports/schema/."""
    return [f"{error.json_path}: {error.message}" for error in _validator(schema).iter_errors(document)]


@functools.cache
def _validator(schema: str) -> Any:  # noqa: ANN401 - jsonschema has no type hints.
    from jsonschema import Draft202012Validator

    content = json.loads((install_paths().schemas / schema).read_bytes())
    Draft202012Validator.check_schema(content)
    # JSON Schema ignores unknown keywords, so a misspelt keyword would check nothing.
    if unknown := list(unknown_keywords(content)):
        message = f"{schema}: unknown keywords: {', '.join(unknown)}"
        raise ValueError(message)
    return Draft202012Validator(content)


def unknown_keywords(schema: object, path: str = "$") -> Iterator[str]:
    """Yield the path of each keyword in a schema, and in the schemas nested in it, that JSON Schema does not define."""
    from jsonschema import Draft202012Validator

    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        keyword_path = f"{path}.{keyword}"
        if keyword not in Draft202012Validator.VALIDATORS and keyword not in _ANNOTATIONS:
            yield keyword_path
        elif keyword in _SCHEMA_KEYWORDS:
            yield from unknown_keywords(value, keyword_path)
        elif keyword == "properties":
            for name, nested in value.items():
                yield from unknown_keywords(nested, f"{keyword_path}.{name}")
        elif keyword == "allOf":
            for index, nested in enumerate(value):
                yield from unknown_keywords(nested, f"{keyword_path}[{index}]")
