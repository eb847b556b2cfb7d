"""The JSON Schema accepts the configurations that are shipped, and what it refuses is refused."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from serve.config import SIZE_KEYS, Config, read_config
from serve.config_schema import schema
from serve.config_settings import keys_of

CONFIGS = Path(__file__).parents[2] / "configs"
SCHEMA = jsonschema.Draft202012Validator(schema())

#: Lines that a configuration may not hold.
MUTANTS = [
    ("server", "hosst", "a"), ("server", "host", 1), ("server", "grpc_port", -1),
    ("server", "grpc_port", 65536), ("server", "grpc_port", "8001"), ("server", "http_port", 1.5),
    ("server", "front", "rust"), ("server", "max_message", "lots"), ("server", "max_message", 64),
    ("server", "max_queue", 0), ("server", "start_timeout_s", 0), ("server", "stop_timeout_s", -1),
    ("server", "max_run_s", 0), ("server", "shared_memory", "yes"),
    ("server", "reject_nonfinite", "yes"), ("models", "repository", 5), ("models", "load", "gcn"),
    ("models", "load", [1]), ("models", "cache_limit", "2 GoB"), ("models", "calibration_s", 0),
    ("models", "executor", "fast"), ("models", "compile", 1), ("device", "kind", "tpu"),
    ("device", "memory_budget", "4 GiB please"), ("device", "lanes", 0),
    ("device", "lane_niceness", 21), ("device", "gpus", []), ("device", "gpus", [-1]),
    ("scheduling", "policy", "best"), ("scheduling", "discipline", "x"),
    ("scheduling", "window_ms", 0), ("scheduling", "qos_factor", 0.5), ("report", "database", 0),
    ("", "extra", {}), ("", "server", 5), ("", "graph", {"name": "a"}),
    ("", "graph", [{"file": "a.npz"}]), ("", "graph", [{"name": "a", "scale": 2}]),
    ("", "graph", [{"name": "a", "hot_memory": "much"}]),
]  # fmt: skip


@pytest.mark.parametrize("name", ["dev.toml", "prod.toml"])
def test_shipped_configurations_are_valid(name):
    assert list(SCHEMA.iter_errors(tomllib.loads((CONFIGS / name).read_text()))) == []


@pytest.mark.parametrize(("section", "key", "value"), MUTANTS)
def test_a_mutant_is_refused_by_the_schema_and_by_the_server(tmp_path, section, key, value):
    table = tomllib.loads((CONFIGS / "prod.toml").read_text())
    (table[section] if section else table)[key] = value
    assert list(SCHEMA.iter_errors(table))
    path = tmp_path / "mutant.toml"
    path.write_text("".join(f"{name} = {as_toml(value)}\n" for name, value in table.items()))
    assert read_config(path)[1]


def as_toml(value):
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {as_toml(part)}" for name, part in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return json.dumps(value)


def test_every_key_is_in_the_schema_with_a_known_type():
    for key, _ in keys_of(Config):
        properties = SCHEMA.schema["properties"]
        for name in key.split("."):
            assert name in properties
            reference = properties[name].get("$ref", "").rpartition("/")[2]
            properties = SCHEMA.schema["$defs"].get(reference, {}).get("properties", {})


@pytest.mark.parametrize(
    ("part", "key"),
    [("ServerConfig", "max_queue"), ("DeviceConfig", "lanes"), ("RowsConfig", "part")],
)
def test_keys_have_their_comments_as_descriptions_whatever_file_they_are_in(part, key):
    assert SCHEMA.schema["$defs"][part]["properties"][key]["description"].endswith(".")


def test_every_size_key_exists():
    assert {key for key, _ in keys_of(Config)} >= SIZE_KEYS
