"""Values from the environment and from ``--set``: which one counts, and what a wrong one says."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.config import Config, effective_values, load_config, read_config
from serve.config_settings import Setting, apply_settings, keys_of, settings_of
from serve.errors import ConfigError

KEYS = [key for key, _ in keys_of(Config)]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text('[server]\nmax_queue = 3\n[models]\nload = ["a"]\n')
    return file


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("in_environment", [False, True])
@pytest.mark.parametrize("in_arguments", [False, True])
def test_the_command_line_comes_first_then_the_environment_then_the_file(
    tmp_path, in_file, in_environment, in_arguments
):
    path = tmp_path / "server.toml"
    path.write_text("[server]\nmax_queue = 3\n" if in_file else "")
    settings = settings_of(
        {"GNNSERVE__SERVER__MAX_QUEUE": "4"} if in_environment else {},
        ["server.max_queue=5"] if in_arguments else [],
    )
    (found,) = (v for v in effective_values(path, settings) if v.key == "server.max_queue")
    if in_arguments:
        assert (found.value, found.source) == (5, "--set")
    elif in_environment:
        assert (found.value, found.source) == (4, "GNNSERVE__SERVER__MAX_QUEUE")
    elif in_file:
        assert (found.value, found.source) == (3, "file")
    else:
        assert (found.value, found.source) == (512, "default")
    assert load_config(path, settings).server.max_queue == found.value


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("report.database=0.0.0.0", "0.0.0.0"),
        ('report.database="0.0.0.0"', "0.0.0.0"),
        ("server.host=::1", "::1"),
        ("server.grpc_port=0", 0),
        ("server.reject_nonfinite=false", False),
        ("server.receive_timeout_s=3", 3.0),
        ("models.load=gcn", ("gcn",)),
        ("models.load=gcn, gat", ("gcn", "gat")),
        ('models.load=["gcn", "7"]', ("gcn", "7")),
        ("device.gpus=0,1", (0, 1)),
        ("device.memory_budget=4 GiB", "4 GiB"),
        ("report.journal=7", "7"),
        ("report.journal=a=b", "a=b"),
    ],
)
def test_a_text_is_read_as_the_key_wants_it(path, setting, value):
    key = setting.partition("=")[0]
    (found,) = (v for v in effective_values(path, settings_of({}, [setting])) if v.key == key)
    assert (found.value, found.source) == (value, "--set")


def test_an_empty_value_restores_the_default(path):
    settings = settings_of({"GNNSERVE__SERVER__MAX_QUEUE": ""}, ["models.load="])
    config = load_config(path, settings)
    assert config.server.max_queue == 512
    assert config.models.load == ()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.hosst=a", ["--set", "'server.hosst'", "did you mean 'server.host'"]),
        ("host=a", ["--set", "unknown key 'host'"]),
        ("server=a", ["unknown key 'server'"]),
        ("base=/", ["unknown key 'base'"]),
        ("graph.name=a", ["resident graphs are set in the file only"]),
        ("server.grpc_port=70000", ["--set: server.grpc_port", "<= 65535"]),
        ("server.grpc_port=many", ["--set: server.grpc_port", "int"]),
        ("server.grpc_port=1\nmax_queue=2", ["--set: server.grpc_port", "int"]),
        ("device.kind=tpu", ["--set: device.kind", "tpu"]),
        ("server.http_port=8001", ["--set: server.grpc_port", "must differ"]),
        ("server.max_message=lots", ["--set: server.max_message", "'lots' is not a size"]),
        ("scheduling.policy=best", ["--set: scheduling.policy", "'best'"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(path, setting, words):
    with pytest.raises(ConfigError) as caught:
        load_config(path, settings_of({}, [setting]))
    for word in words:
        assert word in str(caught.value)
    assert str(path) not in str(caught.value)


def test_a_wrong_variable_is_named_and_the_rest_counts(path):
    settings = settings_of(
        {"GNNSERVE__DEVICE__LANES": "0", "GNNSERVE__SERVER__HOST": "::1", "GNNSERVE_LOG": "INFO"},
        [],
    )
    config, problems = read_config(path, settings)
    assert problems == ["GNNSERVE__DEVICE__LANES: device.lanes: Expected `int` >= 1, got 0"]
    assert config.server.host == "::1"


def test_a_variable_with_a_mistyped_prefix_is_told_and_others_are_not_ours(path):
    found = {"GNNSERVE_SERVER__HTTP_PORT": "1", "GNNSERVE_DATA": "d", "GNNSERVER__X": "2"}
    config, problems = read_config(path, settings_of(found, []))
    assert problems == ["GNNSERVE_SERVER__HTTP_PORT: write GNNSERVE__SERVER__HTTP_PORT"]
    assert config.server.http_port != 1


@pytest.mark.parametrize("argument", ["server.host", "", "=", "=5"])
def test_an_argument_without_a_key_and_a_value_is_refused(argument):
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        settings_of({}, [argument])


@given(st.sampled_from(KEYS), st.text(max_size=40))
def test_any_text_is_taken_or_told(key, text):
    setting = Setting(key, text, "--set")
    _, origins, problems = apply_settings({}, [setting], Config)
    assert bool(origins) + bool(problems) == (1 if text else 0)


def test_the_commands_tell_and_use_settings(path):
    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-m", "serve", *arguments, "--config", str(path)],
            env={"PATH": "/usr/bin", **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    shown = run("config", "show", "--json", GNNSERVE__DEVICE__LANES="2")
    rows = {row["key"]: row for row in json.loads(shown.stdout)}
    assert rows["device.lanes"] == {
        "key": "device.lanes", "value": 2, "source": "GNNSERVE__DEVICE__LANES",
        "reloadable": False,
    }  # fmt: skip
    assert rows["server.max_queue"]["source"] == "file"
    assert "--set" in run("config", "show", "--set", "server.host=::1").stdout
    wrong = run("check", "--fast", "--set", "server.max_queue=0")
    assert wrong.returncode == 2
    assert "--set: server.max_queue: Expected `int` >= 1" in wrong.stderr


def test_keys_of_a_section_within_another(path):
    variables = {"GNNSERVE__SERVER__TLS__CERTIFICATE": "c.crt"}
    settings = settings_of(variables, ["server.tls.key=c.key"])
    found = {row.key: row for row in effective_values(path, settings)}
    certificate, key = found["server.tls.certificate"], found["server.tls.key"]
    assert (certificate.value, certificate.source) == ("c.crt", *variables)
    assert (key.value, key.source) == ("c.key", "--set")
    assert found["server.max_queue"].value == 3
