"""JSON as the chat format writes it: compact, strict, and with the literal spelling of values kept where it matters."""

import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn, TypeAlias

from perilune.errors import UserError

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | tuple[JsonValue, ...] | Mapping[str, JsonValue] | None"

_SPACE = re.compile(r"[ \t\n\r]*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def compact_json(value: object, sort_keys: bool = False) -> str:
    """`value` on one line without spaces, non-ASCII as itself, keys sorted at every depth if `sort_keys`.

    Lone surrogates are written as escapes, so that the result can be encoded whatever `value` holds.
    Raises `UserError` for what JSON cannot say (NaN, objects of other types, nesting too deep).
    """
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys, allow_nan=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"a value cannot be written as JSON ({error}): use null, booleans, finite numbers, text, lists and objects"
        ) from None
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def json_string_piece(text: str) -> str:
    """`text` escaped as the inside of a JSON string; the pieces of a string, escaped one by one, join to the whole."""
    return compact_json(text)[1:-1]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal} is out of range")
    return number


_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def parse_json(text: str) -> JsonValue:
    """The value of strict JSON (no NaN, no number that overflows). Raises `ValueError` for anything else, however deep or long."""
    try:
        value: JsonValue = _STRICT.decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None
    return value


def json_type(value: object) -> str:
    """JSON's name for the type of a value. Raises `UserError` for a value JSON has no type for."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case list() | tuple():
            return "array"
    raise UserError(f"an argument is a {type(value).__name__}, which JSON cannot say: use null, booleans, numbers, text, lists or dicts")


def split_json_object(text: str) -> dict[str, tuple[JsonValue, str]] | None:
    """The members of a JSON object, each with its value and the literal text of that value; None if `text` is not an object.

    The literal keeps what a parse would lose (`1e2`, the spaces in `[1, 2]`), one level deep.
    """
    try:
        if not isinstance(parse_json(text), dict):
            return None
    except ValueError:
        return None
    members: dict[str, tuple[JsonValue, str]] = {}
    position = _skip_space(text, _skip_space(text, 0) + 1)
    while text[position] != "}":
        key, position = _STRICT.raw_decode(text, position)
        start = _skip_space(text, _skip_space(text, position) + 1)  # over the colon
        value, end = _STRICT.raw_decode(text, start)
        members[key] = (value, text[start:end])
        position = _skip_space(text, end)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return members


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position
