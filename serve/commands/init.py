"""`gnnserve init`: write a configuration to start from, with every key in it, commented out."""

import re
from pathlib import Path

from serve.errors import ConfigError
from serve.resources import configs_path

_HEAD = """\
# Configuration of a gnnserve server: gnnserve serve --config {name}
# A key that is commented out has its default. Paths are relative to this file. An unknown key stops
# the start with a message that names it. `gnnserve check --config {name}` finds mistakes.
"""
_KEY = re.compile(r"\w+ = ")
#: Keys that nearly every server sets: written with their defaults.
_SET = ('repository = "models"',)


def write_configuration(path: Path) -> None:
    """Write a configuration with every default to `path`; raises ConfigError if it exists."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starting_configuration(path.name))
    except FileExistsError:
        raise ConfigError(f"{path}: it exists already, and is left as it is") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def starting_configuration(name: str) -> str:
    """Return the text of a configuration file called `name` in which every key has its default."""
    complete = (configs_path() / "prod.toml").read_text(encoding="utf-8")
    _, _, sections = complete.partition("\n\n")
    lines = []
    for line in sections.splitlines():
        is_value = _KEY.match(line) and not line.startswith(_SET)
        lines.append(f"# {line}" if is_value else line)
    return _HEAD.format(name=name) + "\n" + "\n".join(lines) + "\n"
