"""What a configuration that is read again changes, and which of that a running server takes."""

from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from serve.config import RELOADABLE, Config
from serve.config_settings import keys_of


class KeyChange(NamedTuple):
    """A key with two values."""

    key: str
    before: object
    after: object

    @property
    def reloadable(self) -> bool:
        """True when a running server takes the new value."""
        return self.key in RELOADABLE

    def __str__(self) -> str:
        """Name the key and both values as JSON."""
        before, after = (msgspec.json.encode(value).decode() for value in self[1:])
        return f"{self.key}: {before} to {after}"


def changes(before: Config, after: Config) -> list[KeyChange]:
    """Return the keys that differ, in the order of the sections; `graph` counts as one key."""
    keys = [key for key, _ in keys_of(Config)] + ["graph"]
    found = (KeyChange(key, _value(before, key), _value(after, key)) for key in keys)
    return [one for one in found if one.before != one.after]


def with_reloadable(running: Config, fresh: Config) -> Config:
    """Return `running` with the values of `fresh` where a running server takes them."""
    values: dict[str, dict[str, Any]] = {}
    for key in RELOADABLE:
        section, name = key.split(".")
        values.setdefault(section, {})[name] = _value(fresh, key)
    sections = {name: replace(getattr(running, name), **new) for name, new in values.items()}
    return replace(running, **sections)


def _value(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found
