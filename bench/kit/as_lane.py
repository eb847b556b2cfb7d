"""The process of a bench set up as a lane."""

import os
import sys

import torch

from serve.lane.shared_state import without_onednn
from serve.native import Meter
from serve.server.lanes.processes import lane_environment


def become_lane(module: str) -> Meter:
    """Return the meter; first restart `python -m module` with a lane's allocator if needed."""
    torch.set_num_threads(1)
    without_onednn()
    meter = Meter.attach()
    if meter is None:
        with lane_environment():
            if "gnnserve_meter" not in os.environ.get("LD_PRELOAD", ""):
                raise SystemExit("this bench needs the compiled extension: make setup")
            os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
    return meter
