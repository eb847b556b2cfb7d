"""Compare the answers of the same models on the GPU and on the processor.

    python -m tests.gpu.equality [--quick] [--dry]

Every model runs as in a lane: inputs up, forward in an inserted buffer, answer down, on both of a
lane's streams. Errors are relative to the largest value of the processor's answer; the limit is
1e-4. Both compute in float32 (TF32 is off, as it is in torch by default).
"""

import argparse
from itertools import product

import torch

from bench.gpu.kit import MODELS, Result, Rig, graph, relative_error, run
from serve.lane.cuda.streams import UNPARTITIONED

SIZES = ((1, 0), (2, 2), (17, 0), (100, 400), (3000, 30_000), (8000, 80_000))
LIMIT = 1e-4


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(16 << 30, dry=arguments.dry)
    lane = rig.lanes(1)[0]
    on_processor = Rig.open(1, dry=True)
    result.put("tf32", torch.backends.cuda.matmul.allow_tf32)
    sizes = SIZES[:4] if arguments.quick else SIZES
    wanted = list(product(MODELS, ((64, 3), (256, 8))))
    worst: dict[str, float] = {}
    for name, (hidden, layers) in wanted:
        what = f"{name} {layers} x {hidden}"
        with result.part(what):
            here = rig.model(name, 100, 12, hidden, layers)
            there = on_processor.model(name, 100, 12, hidden, layers)
            errors = []
            for num_nodes, num_edges in sizes:
                inputs = graph(num_nodes, num_edges, 100)
                with torch.inference_mode():
                    expected = there(inputs["x"], inputs["edge_index"])
                for kind in UNPARTITIONED:
                    found = lane.call(lane.run, here, inputs, 8 << 30, kind)
                    errors.append(relative_error(found, expected))
            worst[what] = max(errors)
            result.check(f"{what} within {LIMIT}", worst[what] <= LIMIT, worst[what])
    result.put("worst_relative_error", worst)
    most = max(worst.values(), default=float("inf"))
    reached = len(worst) == len(wanted) and most <= LIMIT
    result.aim(1, reached, {"models": f"{len(worst)} of {len(wanted)}", "worst": most})


if __name__ == "__main__":
    run("equality", __doc__, body)
