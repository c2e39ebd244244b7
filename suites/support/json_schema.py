"""Validation of JSON documents by the schemas in reports/schema/, with the package jsonschema."""

from __future__ import annotations

import functools
import json
from typing import Any

from gdrkit.harness.needs import host, needs
from gdrkit.install_paths import install_paths

__all__ = ["JSONSCHEMA", "problems"]

JSONSCHEMA = needs(host.module("jsonschema"))


def problems(schema: str, document: object) -> list[str]:
    """Return one line for each violation of a schema, which is a file in reports/schema/."""
    return [f"{error.json_path}: {error.message}" for error in _validator(schema).iter_errors(document)]


@functools.cache
def _validator(schema: str) -> Any:  # noqa: ANN401 - of jsonschema, which has no types.
    from jsonschema import Draft202012Validator

    text = json.loads((install_paths().schemas / schema).read_bytes())
    Draft202012Validator.check_schema(text)
    return Draft202012Validator(text)
