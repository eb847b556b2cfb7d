"""Scripts in processes that the memory meter is preloaded into, as it is into lanes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import dedent
from typing import Any

from bench.kit.servers import ROOT
from bench.kit.waiting import PATIENCE_S
from serve import native

#: Runs each script that comes in a process forked from here, and then says how that ended.
_SERVER = """
import json, os, sys, traceback
import torch, torch_geometric.nn
import serve.native

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            exec(compile(json.loads(line), "script", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print("ended", os.waitpid(pid, 0)[1], flush=True)
"""


def run_metered(script: str) -> Any:
    """Run `script` with the meter preloaded; what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def metered_forks() -> Iterator[Callable[[str], Any]]:
    """Yield a function like ``run_metered`` whose processes have torch already."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def run(script: str) -> Any:
            print(json.dumps(dedent(script)), file=process.stdin, flush=True)
            said = [process.stdout.readline()]
            if not said[0].startswith("ended"):
                said.append(process.stdout.readline())
            errors.seek(0)
            assert said[-1] == "ended 0\n", errors.read()
            return json.loads(said[0])

        with process:
            yield run
            process.stdin.close()


def _environment() -> dict[str, str]:
    library = native.meter_library_path()
    assert library is not None, "the extension was built without its meter"
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
