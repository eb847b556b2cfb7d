"""Count how a lane answers a mixed trace: replayed without Python, replayed by it, or launched.

    python -m bench.gpu.replayed [--quick] [--dry]

Tasks are for GCN, SAGE, GIN and GAT of 8 × 256 in turns, on new graphs of lognormal sizes: 300
nodes in the median (σ = 1), 5 edges a node (σ = 1/2). A third are samples of a resident graph; a
quarter are two to four requests merged; a quarter are urgent, which have captures of their own. The
lane starts without any capture. The shares of each quarter of the trace are told: the last one is
of a lane that has run for a while. What is replayed depends on sizes, so that models and graphs may
be small with `--dry`. Needs the extension, msgspec and safetensors.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.kit import MODELS, Result, Rig, run
from bench.gpu.served_lane import LIMIT_BYTES, ServedLane, table_of, written
from serve.graphs.features import FeatureKeeper
from serve.ipc.messages import GatherRef, Part, RunTask, TableRef, TensorRef
from serve.server.staging import aligned

FEATURES, CLASSES = 128, 64
ROWS = 10_000
TASKS, QUICK_TASKS, DRY_TASKS = 20_000, 4_000, 300
POOL_BYTES, REPLAY_BYTES = 64 << 20, 256 << 20
_LARGEST = 8_192
#: The most that calibration tries, see ``lane.cuda.capturing``.
REPLAY_MOST = 8_192 + 65_536


@dataclass
class Trace:
    """Tasks at random, whose inputs are put into a lane's pool."""

    lane: ServedLane
    table: TableRef
    rng: np.random.Generator
    largest: int

    def task(self, number: int) -> RunTask:
        """Return another task; the one before must have been answered. Numbers are above 0."""
        rng, self._end = self.rng, 0
        count = int(rng.integers(2, 5)) if rng.random() < 0.25 else 1
        sampled, urgent = rng.random() < 1 / 3, rng.random() < 0.25
        parts = tuple(self._part(sampled=bool(sampled), share=count) for _ in range(count))
        key = tuple(MODELS)[number % len(MODELS)]
        return RunTask(number, key, parts, LIMIT_BYTES, run_ns=1 if urgent else 0)

    def _part(self, *, sampled: bool, share: int) -> Part:
        rng = self.rng
        most = self.largest // share
        nodes = min(max(1, int(300 * rng.lognormal(0, 1))), most)
        edges = min(int(5 * nodes * rng.lognormal(0, 0.5)), 8 * most)
        edge_index = self._put("edge_index", rng.integers(0, nodes, (2, edges), np.int32))
        refs: tuple[TensorRef, ...] = (edge_index,)
        gather = None
        if sampled:
            ids = self._put("ids", rng.integers(0, ROWS, nodes))
            at = self._put("at", np.empty(0, np.int64))
            new = self._put("new", np.empty((0, FEATURES), np.float32))
            gather = GatherRef(self.table, ids, at, new)
        else:
            refs = (self._put("x", np.zeros((nodes, FEATURES), np.float32)), edge_index)
        start, size_bytes = self._end, 4 * nodes * CLASSES
        self._end += aligned(size_bytes)
        return Part(refs, start, size_bytes, gather)

    def _put(self, name: str, value: "np.ndarray[Any, Any]") -> TensorRef:
        ref = self.lane.put(name, value, self._end)
        self._end += aligned(value.nbytes)
        return ref


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(8 << 30, dry=arguments.dry)
    rig.use_kernels()
    tasks = DRY_TASKS if rig.dry else QUICK_TASKS if arguments.quick else TASKS
    width, layers = (8, 2) if rig.dry else (256, 8)
    with ExitStack() as until_end:
        folder = Path(until_end.enter_context(tempfile.TemporaryDirectory()))
        models = {name: written(folder, name, FEATURES, CLASSES, width, layers) for name in MODELS}
        lane = until_end.enter_context(
            ServedLane(rig, models, pool_bytes=POOL_BYTES, replay_bytes=REPLAY_BYTES,
                       replay_most=REPLAY_MOST)
        )  # fmt: skip
        rng = np.random.default_rng(0)
        keeper = FeatureKeeper(dtype="float32", folder=folder, shared=True)
        features = keeper.kept(rng.random((ROWS, FEATURES), np.float32), "bench")
        table = table_of(features)
        lane.map(table)
        lane.occupy_another(1_000)  # a run of 1 ns beside one of a microsecond is urgent
        trace = Trace(lane, table, rng, largest=512 if rig.dry else _LARGEST)
        for quarter in range(4):
            before = lane.counts()
            for number in range(tasks // 4):
                lane.ask(trace.task(quarter * (tasks // 4) + number + 1))
            counts = {way: count - before[way] for way, count in lane.counts().items()}
            whole = sum(counts.values())
            shares = {way: round(count / whole, 4) for way, count in counts.items()}
            result.put(f"quarter {quarter + 1}", shares | {"captures": lane.captures()})
        if not rig.dry:  # there the trace is over before most sizes were captured
            result.check("most of the last quarter is replayed", shares["launched"] < 0.5, shares)


if __name__ == "__main__":
    run("replayed", __doc__, body)
