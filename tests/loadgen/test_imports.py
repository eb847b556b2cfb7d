"""Modules that importing the generator brings into the process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("loadgen.run", ("torch", "serve.core", "serve.server", "serve.models", "serve.rpc")),
        ("loadgen.plan", ("torch", "gevent", "locust", "serve.core", "serve.server")),
        ("loadgen.show", ("torch", "gevent", "locust", "serve.core", "serve.server")),
        ("serve.workload", ("torch", "numpy", "grpc", "gevent")),
        ("serve.graphs.pool", ("torch", "grpc", "gevent")),
    ],
)
def test_no_more_than_it_needs(module, absent):
    code = f"import sys, {module}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
