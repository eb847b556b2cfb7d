"""Strict decoding of TOML tables into frozen structs.

An unknown key, a wrong type and a value out of range are reported with the file, the key and the
rule; an unknown key also with the nearest known one.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from serve.errors import ConfigError
from serve.files import read_text

StructT = TypeVar("StructT", bound=msgspec.Struct)
#: A number of things, at least one.
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]

#: Largest file that is read.
_MAX_FILE_BYTES = 1 << 20
#: Most dots in a key: tomllib takes quadratic time in them.
_MAX_DOTS = 200


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every struct that a table is decoded into."""


def read_toml(path: Path) -> dict[str, Any]:
    """Parse the TOML file at `path`; raises ConfigError, whatever kind of file it is."""
    try:
        text = read_text(path, _MAX_FILE_BYTES)
        if any(part.count(".") > _MAX_DOTS for part in re.split(r"[=,{\n]", text)):
            raise ConfigError(f"{path}: a key of more than {_MAX_DOTS} parts")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not valid TOML: nested too deep") from error
    except ValueError as error:  # tomllib's own, wrong bytes, and numbers of too many digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def toml_readings(text: str) -> list[Any]:
    """Return the value that the text is in TOML; nothing when it is none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return []
    return [table["value"]] if set(table) == {"value"} else []


def decode_table(
    table: dict[str, Any], kind: type[StructT], where: str, hidden: frozenset[str] = frozenset()
) -> StructT:
    """Decode a TOML table into `kind`; raises ConfigError, see ``decode_sound``."""
    found, problems = decode_sound(table, kind, where, hidden)
    if found is None or problems:
        raise ConfigError("\n".join(problems))
    return found


def decode_sound(
    table: dict[str, Any], kind: type[StructT], where: str, hidden: frozenset[str] = frozenset()
) -> tuple[StructT | None, list[str]]:
    """Decode the valid part of a TOML table and list the problems of the rest.

    Returns None for the struct when a required key is missing. Each problem begins with `where` and
    names the key.
    """
    problems: list[str] = []
    sound = _sound_part(table, kind, "", hidden, problems)
    found = None
    try:
        found = msgspec.convert(sound, kind)
    except msgspec.ValidationError as error:
        # A required key is missing. A misspelt or wrong one is already among the problems.
        if not problems:
            problems.append(_told(error, ""))
    return found, [f"{where}: {problem}" for problem in problems]


def _sound_part(
    table: dict[str, Any], kind: type, prefix: str, hidden: frozenset[str], problems: list[str]
) -> dict[str, Any]:
    """Return the part of `table` that the struct `kind` accepts; add the rest to `problems`."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    known = [name for name in fields if name not in hidden]
    sound: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known: {', '.join(known)}"
            problems.append(f"unknown key '{name}'; {hint}")
        elif isinstance(value, dict) and is_section(fields[key]):
            sound[key] = _sound_part(value, fields[key], f"{name}.", frozenset(), problems)
        elif isinstance(value, list) and is_section(row := _row_of(fields[key])):
            sound[key] = _sound_rows(value, row, name, problems)
        elif _fits(value, fields[key], name, problems):
            sound[key] = value
    return sound


def _sound_rows(rows: list[Any], kind: Any, name: str, problems: list[str]) -> list[Any]:
    """Return the rows of an array of tables that decode as `kind`."""
    found = []
    for index, row in enumerate(rows):
        told = len(problems)
        place = f"{name}[{index}]"
        if isinstance(row, dict):
            row = _sound_part(row, kind, f"{place}.", frozenset(), problems)
        if len(problems) == told and _fits(row, kind, place, problems):
            found.append(row)
    return found


def _fits(value: Any, kind: Any, name: str, problems: list[str]) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if get_origin(kind) is Literal and isinstance(value, str):
            choices = ", ".join(map(str, get_args(kind)))
            problems.append(f"{name}: '{value}' is not one of {choices}")
        else:
            problems.append(_told(error, name, value))
        return False
    return True


def _told(error: msgspec.ValidationError, name: str, value: Any = None) -> str:
    """Return the key, the rule, and what is not told by it of `value`, whose key is `name`."""
    rule, _, inner = str(error).partition(" - at `$")
    key = (name + inner.rstrip("`")).removeprefix(".")
    if not inner and isinstance(value, int | float | str) and ", got " not in rule:
        rule += f", got {value!r}"
    return f"{key or 'file'}: {rule}"


def is_section(kind: Any) -> bool:
    """Return True when values of this type are tables of a file."""
    return isinstance(kind, type) and issubclass(kind, Section)


def _row_of(kind: Any) -> Any:
    """Return the element type when `kind` is an array, else None."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None
