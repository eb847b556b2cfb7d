"""Run `gnnserve serve` with as many concurrent tasks as a baseline, and its memory unchecked.

    python -m bench.kit.live_server --config FILE [--at-once N]

The paper's baselines (``serve.sim.workload.BASELINES``) put more tasks on a device than it has
cores and ignore memory. No configuration allows that, so the bench changes the facts of the device.
The server is the same code, on the same lanes and executors. It calibrates no model anew in a gap
between traces: all systems share one calibration, and another would take cores from the next trace.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from serve.commands.serve import Application
from serve.config import load_config
from serve.obs.log import setup_logging
from serve.server.device import find_device
from serve.server.learning import in_gaps

#: More memory than any queue can need.
UNCHECKED_BYTES = 1 << 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--at-once", type=int)
    options = parser.parse_args()
    setup_logging(level="WARNING")
    in_gaps.GAP_S = math.inf
    config = load_config(options.config)
    # All systems have the same number of lanes.
    device = find_device(config.device, spare_lanes=True)
    if options.at_once is not None:
        at_once = min(options.at_once, len(device.lane_cores))
        # A baseline that runs one task at a time uses the last core.
        lanes = device.lane_cores[::-1]
        device = replace(
            device, lane_cores=lanes, parallelism=at_once, budget_bytes=UNCHECKED_BYTES
        )
    Application(config, device).run(lambda *_: print("ready", flush=True), lambda *_: None)


if __name__ == "__main__":
    main()
