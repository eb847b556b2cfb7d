"""Run models that declare their inputs on the GPU, through the server's engine.

    python -m tests.gpu.declared [--quick] [--dry]

Models of the kinds that users bring: several types of nodes, types of edges, integers, pooled and
several outputs. Requests of random sizes are asked one by one, then all at once, so that some run
as one. Answers are compared with this process's processor, and measured peaks with what was
reserved. Needs msgspec.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.gpu.engines import Bench, run_on_engine
from bench.gpu.kit import Result, relative_error
from bench.kit import gallery
from bench.kit.random_requests import random_requests
from serve.lane.models.loader import LoadedModel
from serve.server.engine import Engine
from serve.server.learning.alone import call_of
from tests.gpu.unions import always_merged

LIMIT = 1e-4
MODELS = "molecules", "to_hetero", "attention", "rgcn", "hgt", "links", "gine", "recurrent"
#: Requests of each model.
COUNT, COUNT_SHORT, COUNT_DRY = 24, 8, 3


def body(result: Result, bench: Bench) -> None:
    models = MODELS[:3] if bench.dry else MODELS
    count = COUNT_DRY if bench.dry else COUNT_SHORT if bench.short else COUNT
    loaded = {name: gallery.write(bench.folder, name) for name in models}
    with always_merged(), bench.engine("slack", "rolling", 1) as (engine, _):
        for number, name in enumerate(models):
            with result.part(name):
                check(result, engine, loaded[name], count, seed=number)
        restarts = engine.snapshot().lane_restarts
        result.check("no lane was lost", restarts == 0, restarts)


def check(result: Result, engine: Engine, loaded: LoadedModel, count: int, *, seed: int) -> None:
    """Check one model's answers and peaks."""
    name = loaded.spec.name
    most_bytes = engine.snapshot().budget_bytes // 4

    def reserved(counts: tuple[int, ...]) -> int:
        return int(engine._catalogue.get(name).estimator.estimate(*counts).reserve_bytes)

    drawn = random_requests(
        gallery.interface(loaded), count, seed, lambda counts: reserved(counts) <= most_bytes
    )
    sizes, requests = [], []
    for counts, inputs in drawn:
        sizes.append(counts)
        requests.append({key: tensor.numpy() for key, tensor in inputs.items()})
    with torch.inference_mode():
        expected = [gallery.expected(loaded, arrays) for arrays in requests]

    def ask(at: int) -> Any:
        return engine.submit(call_of(name, requests[at])).result()

    reserves = []
    alone = []
    for at, counts in enumerate(sizes):
        reserves.append(reserved(counts))
        alone.append(ask(at))
    with ThreadPoolExecutor(count) as threads:
        together = list(threads.map(ask, range(count)))
    for how, answers in (("alone", alone), ("together", together)):
        worst = max(
            relative_error(answer.outputs[key], wanted)
            for answer, outputs in zip(answers, expected, strict=True)
            for key, wanted in outputs.items()
        )
        result.check(f"{name}, {how}: answers within {LIMIT}", worst <= LIMIT, worst)
    result.put(f"{name}: requests that ran as one", max(one.record.merged for one in together))
    shares = [
        one.record.pmc_measured_bytes / reserve_bytes
        for one, reserve_bytes in zip(alone, reserves, strict=True)
        if one.record.pmc_measured_bytes
    ]
    if shares:
        result.check(f"{name}: no peak is above its reservation", max(shares) <= 1, max(shares))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    run_on_engine("declared", __doc__, body)
