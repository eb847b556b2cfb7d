"""The configuration for people and programs: its JSON Schema, and a table of its values."""

import ast
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.table import Table

from serve.config import NO_KEYS, RELOADABLE, SIZE_KEYS, Config, EffectiveValue
from serve.core.disciplines import DISCIPLINES
from serve.core.policies import POLICIES
from serve.toml_tables import Section, is_section

_SIZE = r"^\s*\d+(\.\d+)?\s*([KkMmGgTt]?[Ii]?[Bb])?\s*$"


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the configuration file.

    Descriptions are those of the structs' source. `x-reloadable` marks the keys whose new values a
    running server takes at SIGHUP. What only `gnnserve check` can tell is not in it: whether files
    exist, and whether two ports are the same.
    """
    sections = {
        f.encode_name: f.type for f in msgspec.structs.fields(Config) if f.name not in NO_KEYS
    }
    kinds = [_row(kind) for kind in sections.values()]
    _, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    properties: dict[str, Any] = {}
    for key, kind in sections.items():
        reference = {"$ref": f"#/$defs/{_row(kind).__name__}"}
        properties[key] = reference if is_section(kind) else {"type": "array", "items": reference}
        _describe(parts, key, _row(kind))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of gnnserve",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": parts,
    }


def _describe(parts: dict[str, Any], key: str, kind: type[Section]) -> None:
    """Add descriptions and restrictions to the part of the section `key`, and to those within."""
    properties = parts[kind.__name__]["properties"]
    for name, text in _comments(kind).items():
        properties[name]["description"] = text
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if is_section(field.type):
            _describe(parts, f"{key}.{name}", field.type)
        else:
            properties[name] |= _restrictions(f"{key}.{name}", properties[name])
            if f"{key}.{name}" in RELOADABLE:
                properties[name]["x-reloadable"] = True


def values_table(values: Iterable[EffectiveValue]) -> Table:
    """Return a table of keys, values, their sources, and which change at SIGHUP."""
    table = Table(box=None, pad_edge=False)
    for title in ("key", "value", "source", "at SIGHUP"):
        table.add_column(title)
    for found in values:
        value = "–" if found.value is None else msgspec.json.encode(found.value).decode()
        table.add_row(found.key, value, found.source, "read again" if found.reloadable else "")
    return table


def _row(kind: Any) -> type[Section]:
    """Return the struct of a section, or of one row of an array of tables."""
    found: type[Section] = kind if is_section(kind) else kind.__args__[0]
    return found


def _restrictions(key: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return rules that decoding leaves to later checks: known names, and the form of sizes."""
    if key == "scheduling.policy":
        return {"enum": sorted(POLICIES)}
    if key == "scheduling.discipline":
        return {"enum": sorted(DISCIPLINES)}
    if key == "graph.hot_memory":
        return {"pattern": f"^(auto|off)$|{_SIZE}"}
    if key in SIZE_KEYS:
        if found.get("type") == "string":
            return {"pattern": _SIZE}
        return {"anyOf": [{"type": "string", "pattern": _SIZE}, {"type": "null"}]}
    return {}


def _comments(kind: type) -> dict[str, str]:
    """Return the `#:` comment above each field of a struct, by name."""
    source = inspect.getsource(sys.modules[kind.__module__])
    lines = source.splitlines()
    tree = ast.parse(source)
    found = {}
    for body in tree.body:
        if not isinstance(body, ast.ClassDef) or body.name != kind.__name__:
            continue
        for field in body.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                above = []
                for line in reversed(lines[: field.lineno - 1]):
                    if (text := re.match(r"\s*#: ?(.*)", line)) is None:
                        break
                    above.append(text[1])
                if above:
                    found[field.target.id] = " ".join(reversed(above))
    return found
