"""Settings: values for configuration keys from the environment and the command line.

A setting replaces what the file says of its key; one of the command line replaces one of the
environment. Its text is a TOML value, or the bare text where the key takes a string.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from serve.errors import ConfigError
from serve.toml_tables import Section, is_section, toml_readings

#: `GNNSERVE__SERVER__HOST` sets `server.host`.
_PREFIX = "GNNSERVE__"
#: What a variable with a mistyped prefix begins with, and the mark between section and key.
_NEARLY, _MARK = "GNNSERVE_", "__"


class Setting(msgspec.Struct, frozen=True):
    """One value from outside the file."""

    #: As in the file: `server.host`.
    key: str
    #: Empty: as if the file did not hold the key.
    text: str
    #: Where it was found, for messages: `--set` or `GNNSERVE__SERVER__HOST`.
    origin: str


def settings_of(environment: Mapping[str, str], arguments: Iterable[str]) -> tuple[Setting, ...]:
    """Return the settings of environment variables, then those of `key=value` arguments.

    Raises ConfigError for an argument without `=`.
    """
    found = [
        Setting(_key_of(name), text, name)
        for name, text in sorted(environment.items())
        if name.startswith(_PREFIX) or (name.startswith(_NEARLY) and _MARK in name)
    ]
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {argument}: it must be KEY=VALUE, such as server.host=0.0.0.0"
            )
        found.append(Setting(key.strip(), text.strip(), "--set"))
    return tuple(found)


def _key_of(variable: str) -> str:
    """Return the key that a variable sets; the variable itself where its prefix is mistyped."""
    if not variable.startswith(_PREFIX):
        return variable
    return variable.removeprefix(_PREFIX).lower().replace(_MARK, ".")


def apply_settings(
    table: dict[str, Any], settings: Iterable[Setting], kind: type[Section]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Put settings into the table of a file that is decoded as `kind`.

    Returns the new table, the origin of each key that a setting decided, and a problem for each
    setting that cannot be used; such a setting is left out.
    """
    known = dict(keys_of(kind))
    found: dict[str, Any] = dict(table)
    origins: dict[str, str] = {}
    problems = []
    for setting in settings:
        if setting.key not in known:
            mistyped = setting.key == setting.origin
            rest = setting.key.removeprefix(_NEARLY)
            told = f"write {_PREFIX}{rest}" if mistyped else _unknown(setting.key, known)
            problems.append(f"{setting.origin}: {told}")
            continue
        *sections, name = setting.key.split(".")
        inner = _opened(found, sections)
        if inner is None:
            continue  # a mistake in the file, which its decoding tells
        if setting.text:
            try:
                inner[name] = _value(setting.text, known[setting.key])
            except msgspec.ValidationError as error:
                got = "" if ", got " in str(error) else f", got {setting.text}"
                problems.append(f"{setting.origin}: {setting.key}: {error}{got}")
                continue
            origins[setting.key] = setting.origin
        else:
            inner.pop(name, None)
            origins.pop(setting.key, None)
    return found, origins, problems


def keys_of(kind: type[Section]) -> Iterator[tuple[str, Any]]:
    """Yield every key of the sections of `kind` that settings can name, with its type."""
    for field in msgspec.structs.fields(kind):
        if is_section(field.type):
            for name, inner in _keys_within(field.type):
                yield f"{field.encode_name}.{name}", inner


def _keys_within(kind: type[Section]) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(kind):
        if is_section(field.type):
            for name, inner in _keys_within(field.type):
                yield f"{field.encode_name}.{name}", inner
        else:
            yield field.encode_name, field.type


def _opened(table: dict[str, Any], sections: Iterable[str]) -> dict[str, Any] | None:
    """Return the table of a section within `table`, copied into it; None when it is no table."""
    for section in sections:
        inner = table.get(section, {})
        if not isinstance(inner, dict):
            return None
        table[section] = dict(inner)
        table = table[section]
    return table


def _value(text: str, kind: Any) -> Any:
    """Return the value of a setting's text; raises msgspec.ValidationError when none fits."""
    # A TOML value, the elements of an array without its brackets, or the text as it is.
    readings = [
        *toml_readings(text),
        *toml_readings(f"[{text}]"),
        [part.strip() for part in text.split(",")],
        text,
    ]
    problem = None
    for reading in readings:
        try:
            msgspec.convert(reading, kind)
        except msgspec.ValidationError as error:
            # Of a number that is out of range, the range; else what the text is not.
            if problem is None or not toml_readings(text):
                problem = error
        else:
            return reading
    assert problem is not None
    raise problem


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if key.split(".", 1)[0] == "graph":
        return f"'{key}': resident graphs are set in the file only"
    return f"unknown key '{key}'" + (f"; did you mean '{near[0]}'?" if near else "")
