"""Strict conversion of frozen dataclasses to and from JSON, for records, wire messages and saved files.

A missing field without a default, an unknown field or a value of a wrong type raises a :class:`UsageError` that names
the field. The supported types are dataclasses, enums, tuples of one type, mappings with string keys, optional values,
unions of scalars and the JSON scalars.
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
    """Convert a dataclass and its contents to values for :func:`json.dumps`.

    :func:`from_json_data` converts them back.
    """
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


def from_json_data(expected_type: type[_T], value: object, *, where: str = "") -> _T:
    """Convert JSON data to a value of type `expected_type`.

    Parameters
    ----------
    expected_type : type
        A dataclass, or any other type that this module supports.
    value : object
        The data, as :func:`json.loads` returned it.
    where : str
        The name of the value, with which an error message begins. If it is empty, the message begins with the name of
        the type.

    Raises
    ------
    UsageError
        MALFORMED: a field is missing, unknown or of another type. The message begins with the path of the field.
    """
    return typing.cast(
        "_T", _read_value(expected_type, value, where or getattr(expected_type, "__name__", str(expected_type)))
    )


def parse_json(text: str | bytes, *, where: str) -> Any:  # noqa: ANN401 - the type depends on the text.
    """Parse a JSON text and return its data. `where` is the name of the text in error messages.

    Raises
    ------
    UsageError
        MALFORMED: the text is not JSON, is not in UTF-8, is nested too deeply for the parser, or contains NaN or
        Infinity, which JSON does not have.
    """
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        message = f"{where}: not JSON: {error}"
        raise UsageError(message, reason=Reason.MALFORMED) from error


def parse_versioned(expected_type: type[_T], text: str | bytes, *, version: int, where: str) -> _T:
    """Parse a JSON text that has the field ``schema_version``, and return the value of `expected_type`.

    Raises
    ------
    UsageError
        MALFORMED: the text is not JSON, its version is not `version`, or it has an invalid field.
    """
    data = parse_json(text, where=where)
    found_version = data.get("schema_version") if isinstance(data, dict) else None
    if found_version != version:
        message = f"{where}: expected schema_version {version}, found {found_version!r}"
        raise UsageError(message, reason=Reason.MALFORMED, what_to_do="read it with the gdrkit that wrote it")
    return from_json_data(expected_type, data, where=where)


def canonical(value: object) -> str:
    """Return the canonical JSON text of a value: sorted keys and no blanks."""
    return json.dumps(to_json_data(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: object) -> str:
    """Return the SHA-256 of the canonical JSON text of a value, as ``sha256:`` and 64 hexadecimal digits."""
    # A value may contain a file name that is not UTF-8. Python represents its bytes as surrogates, which
    # "surrogatepass" encodes.
    return "sha256:" + hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def _refuse_constant(name: str) -> None:
    message = f"{name} is not a number of JSON"  # NaN, Infinity or -Infinity.
    raise ValueError(message)


def _read_value(expected_type: Any, value: object, where: str) -> object:  # noqa: ANN401, PLR0911 - a type at run time; one return per kind of type.
    origin, type_arguments = typing.get_origin(expected_type), typing.get_args(expected_type)
    if expected_type is typing.Any or expected_type is object or expected_type is Json:
        return value
    if origin in (Union, types.UnionType):
        return _read_union(type_arguments, value, where)
    if origin is tuple:
        items = _check_type(value, list, where)
        return tuple(_read_value(type_arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin in (dict, Mapping):
        members = _check_type(value, dict, where)
        return {key: _read_value(type_arguments[1], item, f"{where}.{key}") for key, item in members.items()}
    if isinstance(expected_type, type) and issubclass(expected_type, enum.Enum):
        try:
            return expected_type(value)
        except ValueError as error:
            allowed_values = ", ".join(str(member.value) for member in expected_type)
            raise _make_malformed_error(where, f"one of {allowed_values}", value) from error
    if dataclasses.is_dataclass(expected_type):
        return _read_dataclass(expected_type, _check_type(value, dict, where), where)
    if expected_type is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _read_float(value, where)
    return _check_type(value, expected_type, where)


def _read_float(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError as error:  # Integers in JSON may have any length.
        raise _make_malformed_error(where, "a finite number", value) from error
    if not math.isfinite(number):
        raise _make_malformed_error(where, "a finite number", value)
    return number


def _read_union(type_arguments: tuple[Any, ...], value: object, where: str) -> object:
    member_types = [member_type for member_type in type_arguments if member_type is not type(None)]
    if value is None and len(member_types) < len(type_arguments):
        return None
    if len(member_types) == 1:
        return _read_value(member_types[0], value, where)
    # All other unions are unions of scalars, so the value must have the type of one member.
    if type(value) in member_types:
        return value
    raise _make_malformed_error(where, " or ".join(member_type.__name__ for member_type in member_types), value)


def _read_dataclass(expected_type: Any, members: dict[str, object], where: str) -> object:  # noqa: ANN401 - a dataclass at run time.
    fields, type_by_field = _list_fields_and_types(expected_type)
    unknown_names = members.keys() - fields.keys()
    if unknown_names:
        raise _make_malformed_error(where, "only the fields " + ", ".join(fields), ", ".join(sorted(unknown_names)))
    field_values = {}
    for name, field in fields.items():
        if name in members:
            field_values[name] = _read_value(type_by_field[name], members[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            field_path = f"{where}.{name}"
            message = f"{field_path}: the field is missing"
            raise UsageError(message, reason=Reason.MALFORMED)
    return expected_type(**field_values)


@functools.cache
def _list_fields_and_types(expected_type: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:  # noqa: ANN401 - a dataclass.
    """Return the fields and types of a dataclass.

    The result is cached, because ``get_type_hints`` takes longer than reading a value.
    """
    return {field.name: field for field in dataclasses.fields(expected_type)}, typing.get_type_hints(expected_type)


def _check_type(value: object, expected_type: Any, where: str) -> Any:  # noqa: ANN401 - the type is known only at run time.
    # In Python a bool is an int, but in JSON true is not a number. So only the type bool accepts a bool.
    if not isinstance(value, expected_type) or (isinstance(value, bool) and expected_type is not bool):
        raise _make_malformed_error(where, expected_type.__name__, value)
    return value


def _make_malformed_error(where: str, expected: str, actual: object) -> UsageError:
    return UsageError(f"{where}: expected {expected}, found {repr(actual)[:80]}", reason=Reason.MALFORMED)
