"""What end-to-end tests share: graphs, references, calls, and a model that misbehaves."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from bench.kit.servers import ROOT, SHORT_CALIBRATIONS, ServerProcess
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import find
from serve.models.writer import write_model
from serve.wire.messages import INFER_METHOD, Response, decode_response, encode_request
from tests.e2e import mischief
from tests.processes import PATIENCE_S, is_running, wait_for

MODELS = ("gcn", "sage", "gin", "gat")
REPOSITORY = ROOT / "configs" / "models"
FEATURES = 32
# The server's lanes are on the same cores: threads that wait for each other would wait for them.
torch.set_num_threads(1)

#: Of one command of a page, which may train models.
_PAGE_TIMEOUT_S = 2 * PATIENCE_S


@dataclass(frozen=True, eq=False)
class Graph:
    """float32 [N, F] and int32 or int64 [2, E]."""

    x: np.ndarray
    edge_index: np.ndarray

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return {"x": self.x, "edge_index": self.edge_index}


def random_graph(num_nodes: int, num_edges: int, seed: int = 0, dtype: type = np.int64) -> Graph:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_nodes, FEATURES), dtype=np.float32)
    edges = rng.integers(0, max(num_nodes, 1), (2, num_edges), dtype=dtype)
    return Graph(x, edges)


GOOD = random_graph(30, 90, seed=7)


class Reference:
    """Direct PyG in this process: what every answer must equal."""

    def __init__(self, repository: Path = REPOSITORY) -> None:
        self._repository = repository
        self._models: dict[str, LoadedModel] = {}

    def __call__(self, model: str, graph: Graph) -> np.ndarray:
        if model not in self._models:
            self._models[model] = load_model(find(self._repository, model))
        inputs = {
            "x": torch.from_numpy(graph.x.copy()),
            "edge_index": torch.from_numpy(graph.edge_index.astype(np.int64)),
        }
        return self._models[model].run(inputs).numpy()


def run_python(arguments: list[str], folder: Path, *modules: Path) -> str:
    """What Python prints that is started in `folder`, finds also `modules`, and ends well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            **SHORT_CALIBRATIONS,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *modules))),
        },
        capture_output=True,
        text=True,
        timeout=_PAGE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal within 1e-4 of the output's scale."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    scale = float(np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * scale)


# -- calls without a client library -----------------------------------------------------------


@contextmanager
def raw_channel(server: ServerProcess) -> Iterator[Callable[..., bytes]]:
    """ModelInfer with bytes in and bytes out, and no limits of the client's own."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.target, options) as channel:
        yield channel.unary_unary(INFER_METHOD)


def infer(call: Any, model: str, graph: Graph, **parameters: Any) -> Response:
    message = encode_request(model, graph.tensors, parameters=parameters)
    return decode_response(call(message, timeout=PATIENCE_S))


def assert_answers(server: ServerProcess) -> None:
    """A good request gets a good answer."""
    with raw_channel(server) as call:
        assert infer(call, "gcn", GOOD).outputs["output"].shape == (30, 5)


# -- a model that misbehaves on demand --------------------------------------------------------

_BARRIER = """
import time
from pathlib import Path

while not Path(__file__).with_name("open").exists():
    time.sleep(0.01)
"""


_HANGS = """
import time

time.sleep(600)
"""
_HANGS_WHEN_IT_RUNS = """
import time

from serve.models import zoo

def forward(x, edge_index):
    print("the first run", flush=True)
    time.sleep(600)

def build(**args):
    model = zoo.gcn(**args)
    model.forward = forward
    return model
"""


def hanging_model(root: Path, name: str = "hangs", *, loads: bool = False) -> None:
    """Write a model of which the loading never ends, or where it `loads`, the first run."""
    shutil.copytree(REPOSITORY / "gcn", root / name)
    (folder,) = (path.parent for path in (root / name).rglob("config.toml"))
    (folder / "model.py").write_text(_HANGS_WHEN_IT_RUNS if loads else _HANGS)
    text = (folder / "config.toml").read_text()
    config = re.sub(r"^factory = .*$", 'factory = "./model.py:build"', text, flags=re.MULTILINE)
    assert config != text
    (folder / "config.toml").write_text(config)


class Troubled:
    """A repository with the model `mischief` (see ``mischief``) and copies of shipped models."""

    def __init__(self, folder: Path, *shipped: str) -> None:
        self.root = folder / "models"
        for name in shipped:
            shutil.copytree(REPOSITORY / name, self.root / name)
        torch.manual_seed(0)
        self.module = mischief.build()
        self.folder = write_model(
            self.root, "mischief", self.module, factory="./model.py:build", args={}
        )
        shutil.copy(mischief.__file__, self.folder / "model.py")

    def graph(self, word: float = 0.0, num_nodes: int = 3) -> Graph:
        """A graph that says `word`; seconds to run for are `mischief.SLEEP` + seconds."""
        if word > mischief.SLEEP:
            self._release.unlink(missing_ok=True)
        x = np.random.default_rng(num_nodes).standard_normal((num_nodes, 4), dtype=np.float32)
        x[0, 0] = word
        return Graph(x, np.zeros((2, 0), np.int64))

    def bar_loading(self) -> None:
        """Keep whoever loads the model waiting until `let_load`."""
        code = self.folder / "model.py"
        code.write_text(_BARRIER + code.read_text())

    def let_load(self) -> None:
        """Let the model be loaded after all."""
        (self.folder / "open").touch()

    def expected(self, graph: Graph) -> np.ndarray:
        with torch.inference_mode():
            return self.module.linear(torch.from_numpy(graph.x)).numpy()

    @contextmanager
    def holding(self) -> Iterator[Graph]:
        """A graph whose requests run until this ends, also those that still wait for a lane."""
        try:
            yield self.graph(mischief.HOLD)
        finally:
            # Stays until the next is held: a request that starts between two looks would wait
            # for a release that is over.
            self._release.touch()
            wait_for(lambda: not self.running(), "the end of all runs")

    @property
    def _release(self) -> Path:
        return self.folder / "release"

    def running(self) -> set[int]:
        """Processes that run for as long as they were told to, those killed meanwhile left out."""
        pids = {int(path.suffix[1:]) for path in self.folder.glob("running.*")}
        return {pid for pid in pids if is_running(pid)}
