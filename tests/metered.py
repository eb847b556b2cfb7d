"""Scripts in a process that the memory meter is preloaded into, as it is into lanes."""

import json
import os
import subprocess
import sys
from textwrap import dedent
from typing import Any

from bench.kit.servers import ROOT
from bench.kit.waiting import PATIENCE_S
from serve import native


def run_metered(script: str) -> Any:
    """Run `script` with the meter preloaded; what it prints as JSON."""
    library = native.meter_library_path()
    assert library is not None, "the extension was built without its meter"
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
