import tomllib
from pathlib import Path

import msgspec
import pytest

from serve.config import NO_KEYS, Config, load_config
from serve.models.repository import ModelSpec, scan

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.toml"))


def test_there_are_files():
    assert {"dev.toml", "prod.toml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_loads_and_its_models_are_sound(path):
    config = load_config(path)
    assert all(
        isinstance(model, ModelSpec) for model in scan(config.path(config.models.repository))
    )


def test_prod_spells_every_key_out():
    text = (CONFIGS / "prod.toml").read_text()
    # A key whose default is "decide for me" stands commented out.
    uncommented = "\n".join(
        line.removeprefix("# ") if " = " in line or line.startswith("# [[") else line
        for line in text.splitlines()
    )
    table = tomllib.loads(uncommented)
    expected = {
        section.encode_name: {field.encode_name for field in msgspec.structs.fields(section.type)}
        for section in msgspec.structs.fields(Config)
        if section.encode_name not in NO_KEYS | {"graph"}
    }
    assert {name: set(keys) for name, keys in table.items() if name != "graph"} == expected
