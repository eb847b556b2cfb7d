"""What tests of models that do harm share: such models, what they are told, and others beside."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import pytest

from bench.kit.servers import ServerProcess
from serve.models.writer import write_model
from tests.e2e import harm
from tests.e2e.support import GOOD, Graph, assert_equal, infer, raw_channel
from tests.processes import descendants, metric, wait_for

#: Lanes of their servers.
LANES = 2
#: Requests of others that are answered beside each deed, at least.
_BESIDE = 10
#: Between the requests of others, which would keep a core busy without it.
PAUSE_S = 0.005


def name_of(deed: Callable[..., object]) -> str:
    return deed.__name__


def write_harmful(
    root: Path, name: str, code: ModuleType = harm, *, module: Any = None, lines: str = ""
) -> Path:
    """Write the model that `code` builds, or `module` by it, with further lines of its config."""
    built = code.build() if module is None else module
    folder = write_model(root, name, built, factory="./model.py:build", args={})
    shutil.copy(str(code.__file__), folder / "model.py")
    if lines:
        config = folder / "config.toml"
        before = config.read_text()
        after = re.sub(r"^(factory = .*)$", rf"\1\n{lines}", before, flags=re.M)
        assert after != before
        config.write_text(after)
    return folder


def saying(word: float) -> Graph:
    """A graph whose first feature says what the model shall do."""
    x = np.random.default_rng(3).standard_normal((3, 4), dtype=np.float32)
    x[0, 0] = word
    return Graph(x, np.zeros((2, 0), np.int64))


def graph(deed: Callable[..., object] | None = None) -> Graph:
    """A graph that says which deed of ``harm`` to do."""
    return saying(0.0 if deed is None else 1.0 + harm.DEEDS.index(deed))


def refusal(call: Any, model: str, asked: Graph, **parameters: Any) -> grpc.RpcError:
    """The error that the request ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        infer(call, model, asked, **parameters)
    return caught.value


def lanes_of(server: ServerProcess) -> set[int]:
    """Children of the fork server."""
    return {pid for child in descendants(server.pid) for pid in descendants(child)}


@contextmanager
def beside_others(
    server: ServerProcess, reference: Callable[[str, Graph], np.ndarray]
) -> Iterator[Any]:
    """A call; others ask `gcn` all the while, and all their answers are right.

    Afterwards the server has all its lanes and nothing reserved.
    """
    expected = reference("gcn", GOOD)
    with raw_channel(server) as call, ThreadPoolExecutor(1) as thread:
        going = True

        def ask() -> int:
            asked = 0
            while going or asked < _BESIDE:
                assert_equal(infer(call, "gcn", GOOD).outputs["output"], expected)
                asked += 1
                time.sleep(PAUSE_S)
            return asked

        others = thread.submit(ask)
        try:
            yield call
        finally:
            going = False
        assert others.result() >= _BESIDE
    wait_for(lambda: metric(server, "gnnserve_lanes_up") == LANES, "all lanes up")
    wait_for(lambda: metric(server, "gnnserve_memory_reserved_bytes") == 0, "an empty ledger")
