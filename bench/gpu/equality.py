"""The same models on the GPU and on the processor: how far answers are apart.

    python -m bench.gpu.equality [--quick] [--dry]

Every model goes the way a lane goes: inputs up, forward in an inserted buffer, answer down, on both
of a lane's streams. Relative error is to the largest value of the processor's answer; 1e-4 is the
limit. Both compute in float32 (TF32 is off, as it is in torch by default).
"""

import argparse
from itertools import product

import torch

from bench.gpu.kit import MODELS, Result, Rig, graph, run

SIZES = ((1, 0), (2, 2), (17, 0), (100, 400), (3000, 30_000), (8000, 80_000))
LIMIT = 1e-4


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(16 << 30, dry=arguments.dry)
    queue, lane = rig.queue(), rig.lane()
    on_processor = Rig.open(1, dry=True)
    result.put("tf32", torch.backends.cuda.matmul.allow_tf32)
    worst: dict[str, float] = {}
    for name, (hidden, layers) in product(MODELS, ((64, 3), (256, 8))):
        with result.part(f"{name} {layers} x {hidden}"):
            here = rig.model(name, 100, 12, hidden, layers)
            there = on_processor.model(name, 100, 12, hidden, layers)
            for num_nodes, num_edges in SIZES[:4] if arguments.quick else SIZES:
                inputs = graph(num_nodes, num_edges, 100)
                with torch.inference_mode():
                    expected = there(inputs["x"], inputs["edge_index"])
                for urgent in (False, True):
                    place = torch.empty_like(expected)
                    if lane is not None:
                        lane.insert(8 << 30)
                    with queue.running(urgent=urgent), torch.inference_mode():
                        placed = queue.upload(inputs)
                        output = here(placed["x"], placed["edge_index"]).contiguous()
                        queue.download(output, place)
                        del placed, output
                    if lane is not None:
                        lane.clear()
                    scale = max(float(expected.abs().max()), 1e-6)
                    error = float((place - expected).abs().max()) / scale
                    key = f"{name} {layers}x{hidden}"
                    worst[key] = max(worst.get(key, 0.0), error)
            result.check(
                f"{name} {layers} x {hidden} within {LIMIT}", worst[key] <= LIMIT, worst[key]
            )
    result.put("worst_relative_error", worst)
    result.aim(1, all(error <= LIMIT for error in worst.values()), max(worst.values()))


if __name__ == "__main__":
    run("equality", __doc__, body)
