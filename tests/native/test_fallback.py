"""Without the extension everything still works, and the log says so once."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from bench.kit.waiting import PATIENCE_S

SCRIPT = dedent("""
    import sys
    sys.modules["serve._core"] = None  # as if it was never built
    import numpy as np
    from serve import native
    assert not native.COMPILED
    assert native.meter_library_path() is None
    assert native.Meter.attach() is None
    target = np.empty((2, 2), np.int64)
    source = np.array([[0, 1], [1, 0]], np.int32)
    assert native.stage_indices(source, True, 2, target) == -1
    assert (target == source).all()
    assert native.stage_indices(source, True, 1, target) == 1
    assert native.stage_indices(np.array([0, 0]), False, 2, np.empty(2, np.int64)) == -1
    assert native.stage_features(np.ones(3, np.float32), np.empty(3, np.float32), True) == -1
    ranges = native.OffsetAllocator(1024, 64)
    assert ranges.alloc(100) == 0
""")


def test_the_twin_takes_over_and_is_announced():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiled extension is missing") == 1
