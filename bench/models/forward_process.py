"""A process that holds one model on one executor and times its forward passes when asked.

    python -P bench/models/forward_process.py KIND PIPE

It is run by its path, with the packages of any checkout on its path, so that two versions can be
compared (``bench.models.executors``). So it imports nothing of them before it is asked, and then
only what they have had for long. PIPE is the number of an open file.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Width and depth.
SHAPES = {"small": (64, 3), "paper": (256, 8)}
FEATURES, CLASSES, DEGREE = 100, 12, 10
EXECUTORS_OF = {"stock": (), "csr": ("csr",), "csr_compiled": ("csr_compiled", "compiled")}


def serve(kind: str, channel: Connection) -> None:
    """Answer until told to end, or nobody can ask any more."""
    import torch

    from serve.lane.measure.tracing import trace

    torch.set_num_threads(1)
    run: Callable[[], Any] = lambda: None  # noqa: E731
    held: dict[tuple[str, str], tuple[Any, Any, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while (question := channel.recv()) is not None:
            if question == "run":
                channel.send(mean_ms(run))
                continue
            model, shape, nodes = question
            if (model, shape) not in held:
                held.clear()
                held[model, shape] = loaded_on(kind, model, shape, Path(folder))
            loaded, signature, about = held[model, shape]
            run = partial(loaded.run, graph_for(nodes, loaded.spec.inputs, signature))
            for _ in range(2):
                run()
            peak_bytes = trace(run, loaded.module, nodes, DEGREE * nodes).peak_bytes
            channel.send(about | {"peak_bytes": peak_bytes})


def loaded_on(kind: str, model: str, shape: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model on the executor, its signature, and facts for the result."""
    import torch

    from bench.kit.architectures import NODE_INPUTS, load, on_executor, wrap
    from serve.lane.executors import CannotRun
    from serve.models import zoo

    def make() -> tuple[Any, Any]:
        if shape not in SHAPES:
            return load(model, features=FEATURES)
        hidden, layers = SHAPES[shape]
        torch.manual_seed(0)
        factory = getattr(zoo, model)
        module = factory(FEATURES, CLASSES, hidden_channels=hidden, num_layers=layers)
        return wrap(module, model, NODE_INPUTS, FEATURES)

    loaded, signature = make()
    about: dict[str, Any] = {}
    for name in EXECUTORS_OF[kind]:
        started_s = time.monotonic()
        try:
            loaded = on_executor(make, name, folder / f"{model} {shape} {name}")
            about["ready_s"] = round(time.monotonic() - started_s, 1)
            break
        except CannotRun as error:
            about.setdefault("reason", str(error))
    return loaded, signature, {"executor": loaded.executor, **about}


def graph_for(nodes: int, names: tuple[str, ...], signature: Any) -> dict[str, Any]:
    """Return the inputs of those names for a seeded random graph."""
    import torch

    torch.manual_seed(nodes)
    edges = DEGREE * nodes
    made = {
        "x": torch.randn(nodes, FEATURES),
        "edge_index": torch.randint(nodes, (2, edges)),
        "edge_weight": torch.rand(edges),
        "edge_attr": torch.rand(edges, signature.edge_dim or 0),
        "batch": torch.zeros(nodes, dtype=torch.int64),
    }
    return {name: made[name] for name in names}


def mean_ms(run: Callable[[], Any]) -> float:
    """Return the mean of as many passes as fit into ten milliseconds, at least one."""
    started_ns = time.perf_counter_ns()
    passes = 0
    while (took_ns := time.perf_counter_ns() - started_ns) < 10_000_000 or not passes:
        run()
        passes += 1
    return took_ns / passes / 1e6


if __name__ == "__main__":
    with suppress(EOFError):
        serve(sys.argv[1], Connection(int(sys.argv[2])))
