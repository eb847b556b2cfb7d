"""docs/estimates.md: its commands print estimates."""

import pytest

from bench.kit.result import ROOT
from tests.docs.pages import texts
from tests.e2e.support import run_python

(COMMANDS,) = texts("docs/estimates.md", "sh", "dev")


@pytest.mark.parametrize("command", COMMANDS.splitlines())
def test_estimates_are_printed(command, server):
    text = command.replace("configs/dev.toml", str(server.config))
    assert "sage version 1" in run_python(["-m", "serve", *text.split()[1:]], ROOT)
