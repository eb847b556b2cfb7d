"""`gnnserve simulate` with models of the user's own."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from bench.kit.servers import ROOT
from serve.commands.simulate import simulate_workload
from serve.config import load_config
from serve.core.cluster.route import RULES
from serve.errors import ConfigError
from serve.workload import PoolSpec


@pytest.fixture
def config(tmp_path):
    """A repository with one model under a name of its own, and one that is broken."""
    models = tmp_path / "models"
    shutil.copytree(ROOT / "configs" / "models" / "gcn", models / "mine")
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "config.toml").write_text("[model]\nno = 1\n")
    path = tmp_path / "server.toml"
    path.write_text(
        f'[models]\nrepository = "{models}"\ncalibration_s = 0.5\n'
        '[scheduling]\npolicy = "slack"\ndiscipline = "preemptive"\n'
    )
    return path


#: Of generated graphs, which otherwise take seconds to make.
SMALL = ("--scale", "0.01", "--max-nodes", "300")


def simulate(config, workload, *more):
    return subprocess.run(
        [
            sys.executable, "-m", "serve", "simulate", "--config", str(config), "--workload",
            workload, "--rho", "0.3", "--policy", "slack", "--discipline", "preemptive",
            "--requests", "20", "--json", *SMALL, *more,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)
def test_a_mix_is_of_the_models_of_the_repository(config):
    done = simulate(config, "mix")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"] == 20
    smaller = json.loads(simulate(config, "mix", "--max-nodes", "100", "--max-edges", "0").stdout)
    assert smaller["jct_mean_ns"] < found["jct_mean_ns"]


def test_a_model_that_is_not_there_is_told_with_those_that_are(config):
    done = simulate(config, "gcn")
    assert done.returncode == 2
    assert "workload 'gcn' is not one of mine, mix" in done.stderr


@pytest.mark.timeout(300)
def test_several_servers_are_behind_a_front(config):
    done = simulate(config, "mix", "--machines", "3", "--front", "count")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["requests"], found["completed"]) == (20, 20)
    refused = simulate(config, "mix", "--front", "best")
    assert refused.returncode == 2
    assert f"unknown rule of a front 'best'; known: {', '.join(RULES)}" in refused.stderr


def test_the_rules_are_told():
    told = subprocess.run(
        [sys.executable, "-m", "serve", "simulate", "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout  # fmt: skip
    line = next(line for line in told.splitlines() if "--front" in line)
    assert all(rule in line for rule in RULES)


@pytest.mark.parametrize("rho", [0.0, float("inf"), float("nan")])
def test_a_load_that_is_none_is_told(config, rho):
    with pytest.raises(ConfigError, match=f"rho: {rho} must be finite and more than 0"):
        simulate_workload(
            load_config(config), "mine", rho, policy="slack", discipline="preemptive", requests=1,
            seed=0, pool=PoolSpec(), devices=1, machines=1, front="in_time",
            progress=lambda *_: None,
        )  # fmt: skip
