"""A command whose packages are missing says which extra to install."""

import subprocess
import sys

import pytest


def run_without(module, *arguments):
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from gnnserve.__main__ import main; main()"
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("module", "arguments", "extras"),
    [
        ("typer", ["serve", "--config", "x.toml"], "gnnserve[server]"),
        ("typer", [], "gnnserve[server]"),
        ("msgspec", ["load", "--target", "x"], "gnnserve[load]"),
        ("prometheus_client", ["serve", "--config", "configs/dev.toml"], "gnnserve[server]"),
        ("rich", ["demo"], "gnnserve[server,load]"),
    ],
)
def test_one_sentence_says_what_to_install(module, arguments, extras):
    done = run_without(module, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert module in done.stderr
    assert done.stderr.strip().endswith(f"pip install '{extras}'")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_module_of_ours_is_a_defect():
    done = run_without("serve.core.policies", "serve", "--config", "x.toml")
    assert "Traceback" in done.stderr
