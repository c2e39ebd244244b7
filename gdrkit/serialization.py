"""Strict serialization of frozen dataclasses to and from JSON.

A value is read back exactly as it was written, or not at all. A missing, unknown or wrongly typed field is a
:class:`UsageError` that names the field. Supported are dataclasses, enums, tuples of one type, mappings with string
keys, optional values and the JSON scalars.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar, Union

from gdrkit.errors import Reason, UsageError

__all__ = ["Json", "canonical", "digest", "from_json_data", "parse_json", "to_json_data"]

# The values that json.loads returns and json.dumps accepts.
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_T = TypeVar("_T")


def to_json_data(value: object) -> Json:
    """Convert a dataclass and its contents to values for :func:`json.dumps`; :func:`from_json_data` is the inverse."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return to_json_data(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json_data(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        items = sorted(value) if isinstance(value, frozenset | set) else value
        return [to_json_data(item) for item in items]
    message = f"{type(value).__name__} has no JSON form: {value!r}"
    raise UsageError(message)


def from_json_data(kind: type[_T], value: object, *, where: str = "") -> _T:
    """Convert plain data to a value of type `kind`.

    Parameters
    ----------
    kind : type
        A dataclass, or any other type that this module supports.
    value : object
        The data, as :func:`json.loads` returned it.
    where : str
        The name of the value in error messages.

    Raises
    ------
    UsageError
        MALFORMED: a value is missing, unknown or of another type. The message begins with its path.
    """
    return typing.cast("_T", _read(kind, value, where or getattr(kind, "__name__", str(kind))))


def parse_json(text: str | bytes, *, where: str) -> Any:  # noqa: ANN401 - whatever the text holds.
    """Return the data of a JSON text.

    Raises
    ------
    UsageError
        MALFORMED: the text is not JSON, is not in UTF-8, is nested too deeply for the parser, or contains a number that
        is not JSON (NaN). The message begins with `where`.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        message = f"{where}: no JSON: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error


def canonical(value: object) -> str:
    """Return the canonical JSON text of a value: sorted keys and no blanks."""
    return json.dumps(to_json_data(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: object) -> str:
    """Return ``sha256:`` and 64 hexadecimal digits, computed from the canonical text."""
    # File names need not be UTF-8. Python then decodes them with surrogates.
    return "sha256:" + hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def _no_constant(name: str) -> None:
    message = f"{name} is no number of JSON"
    raise ValueError(message)


def _read(kind: Any, value: object, where: str) -> object:  # noqa: ANN401, PLR0911 - a type at run time; one return per shape.
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is typing.Any or kind is object or kind is Json:
        return value
    if origin in (Union, types.UnionType):
        return _read_optional(arguments, value, where)
    if origin is tuple:
        items = _expect(value, list, where)
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin in (dict, Mapping):
        pairs = _expect(value, dict, where)
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in pairs.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError as error:
            raise _malformed(where, "one of " + ", ".join(str(member.value) for member in kind), value) from error
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, _expect(value, dict, where), where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _read_float(value, where)
    return _expect(value, kind, where)


def _read_float(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError as error:  # Integers in JSON may have any length.
        raise _malformed(where, "a finite number", value) from error
    if not math.isfinite(number):
        raise _malformed(where, "a finite number", value)
    return number


def _read_optional(arguments: tuple[Any, ...], value: object, where: str) -> object:
    kinds = [kind for kind in arguments if kind is not type(None)]
    if value is None and len(kinds) < len(arguments):
        return None
    if len(kinds) == 1:
        return _read(kinds[0], value, where)
    # Other unions are unions of scalars, so the type of the value selects the member.
    if type(value) in kinds:
        return value
    raise _malformed(where, " or ".join(kind.__name__ for kind in kinds), value)


def _read_dataclass(kind: Any, pairs: dict[str, object], where: str) -> object:  # noqa: ANN401 - a dataclass at run time.
    fields, hints = _fields(kind)
    unknown = pairs.keys() - fields.keys()
    if unknown:
        raise _malformed(where, "no other field than " + ", ".join(fields), ", ".join(sorted(unknown)))
    given = {}
    for name, field in fields.items():
        if name in pairs:
            given[name] = _read(hints[name], pairs[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            path = f"{where}.{name}"
            raise _malformed(path, "a value", "nothing")
    return kind(**given)


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:  # noqa: ANN401 - a dataclass.
    """Return the fields and types of a dataclass.

    The result is cached, because finding them takes longer than reading a value.
    """
    return {field.name: field for field in dataclasses.fields(kind)}, typing.get_type_hints(kind)


def _expect(value: object, kind: Any, where: str) -> Any:  # noqa: ANN401 - the type is known only at run time.
    # In Python a bool is an int, but a record never means it as one.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _malformed(where, kind.__name__, value)
    return value


def _malformed(where: str, expected: str, found: object) -> UsageError:
    shown = repr(found)
    return UsageError(f"{where}: expected {expected}, found {shown[:80]}", reason=Reason.MALFORMED)
