"""`gnnserve calibrate`: what is known of models, measured anew and forgotten."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from bench.kit.servers import ROOT, SHORT_CALIBRATIONS
from serve.cli import app
from serve.errors import ConfigError


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Runs a command on a configuration with one model and an empty cache."""
    shutil.copytree(ROOT / "configs" / "models" / "gcn", tmp_path / "models" / "gcn")
    path = tmp_path / "server.toml"
    # What lanes keep of their memory is part of a calibration's key.
    path.write_text(
        '[models]\nrepository = "models"\ncache = "cache"\n[device]\nmemory_budget = "2 GiB"\n'
    )
    for name, value in SHORT_CALIBRATIONS.items():
        monkeypatch.setenv(name, value)

    def run(*arguments):
        done = CliRunner().invoke(app, ["calibrate", *arguments, "--config", str(path)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout

    return run


def test_a_calibration_is_made_listed_and_forgotten(ask):
    (before,) = json.loads(ask("list", "--json"))
    assert before["time_error"] is None
    assert "not calibrated" in ask("list")
    assert "gcn:1: was not calibrated" in ask("forget", "gcn")
    assert "gcn:1: calibrated on" in ask("run", "gcn")
    (after,) = json.loads(ask("list", "--json"))
    assert after["executor"]
    assert after["time_error"] > 0
    assert "gcn:1: forgotten" in ask("forget", "gcn")
    assert json.loads(ask("list", "--json")) == [before]


def test_an_unknown_model_is_named(ask):
    with pytest.raises(ConfigError, match="gnc"):
        ask("forget", "gnc")
