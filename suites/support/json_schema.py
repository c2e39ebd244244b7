"""Validation of JSON documents with the schemas in reports/schema/, by the Python package jsonschema."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from gdrkit.harness.needs import host, needs
from gdrkit.install_paths import install_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NEEDS_JSONSCHEMA", "find_unknown_keywords", "find_violations"]

# Mark of the cases that need the package jsonschema.
NEEDS_JSONSCHEMA = needs(host.module("jsonschema"))

# Keywords that jsonschema does not check separately: annotations, and keywords that belong to `if`.
_UNCHECKED_KEYWORDS = frozenset({"$schema", "$id", "title", "description", "then", "else"})
# Keywords whose value is a schema.
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "propertyNames", "if", "then", "else")


def find_violations(schema_name: str, document: object) -> list[str]:
    """Return one line for each violation of a schema by the document.

    `schema_name` is the name of a file in reports/schema/.
    """
    return [f"{error.json_path}: {error.message}" for error in _make_validator(schema_name).iter_errors(document)]


@functools.cache
def _make_validator(schema_name: str) -> Any:  # noqa: ANN401 - jsonschema has no type hints.
    from jsonschema import Draft202012Validator

    schema_data = json.loads((install_paths().schemas / schema_name).read_bytes())
    Draft202012Validator.check_schema(schema_data)
    # JSON Schema ignores unknown keywords, so a misspelt keyword would check nothing.
    if unknown_keywords := list(find_unknown_keywords(schema_data)):
        message = f"{schema_name}: unknown keywords: {', '.join(unknown_keywords)}"
        raise ValueError(message)
    return Draft202012Validator(schema_data)


def find_unknown_keywords(schema: object, path: str = "$") -> Iterator[str]:
    """Yield the path of each keyword in a schema, and in the schemas nested in it, that JSON Schema does not define."""
    from jsonschema import Draft202012Validator

    if not isinstance(schema, dict):
        return
    for keyword, keyword_value in schema.items():
        keyword_path = f"{path}.{keyword}"
        if keyword not in Draft202012Validator.VALIDATORS and keyword not in _UNCHECKED_KEYWORDS:
            yield keyword_path
        elif keyword in _SCHEMA_KEYWORDS:
            yield from find_unknown_keywords(keyword_value, keyword_path)
        elif keyword == "properties":
            for name, nested_schema in keyword_value.items():
                yield from find_unknown_keywords(nested_schema, f"{keyword_path}.{name}")
        elif keyword == "allOf":
            for index, nested_schema in enumerate(keyword_value):
                yield from find_unknown_keywords(nested_schema, f"{keyword_path}[{index}]")
