"""The GPU benches of heavy rows and of merged requests: that they see what is wrong."""

import argparse
import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.gpu import launching
from bench.gpu.engines import Bench
from bench.gpu.kit import Result
from serve.lane.cuda.graph_kernels import simulated_kernels
from serve.native_cuda import library_path
from serve.server.api import Tensor
from tests.gpu import heavy, unions
from tests.gpu.heavy import Sorted, same_twice

#: More than so many neighbours, and a row is reduced in pieces.
HEAVY = 512


def failed(result, tmp_path):
    code = result.finish()
    found = json.loads((tmp_path / "result.json").read_text())
    rows = [row["what"] for row in found["checks"] if not row["passed"]]
    assert code == bool(rows)
    return rows


@pytest.fixture
def result(tmp_path):
    return Result("made up", True, tmp_path / "result.json")


@pytest.mark.parametrize("quick", [False, True])
def test_every_graph_has_rows_that_are_reduced_in_pieces(quick):
    made = list(heavy.graphs(quick))
    for name, num_nodes, edges in made:
        degrees = edges[1].bincount(minlength=num_nodes)
        assert degrees.max() > HEAVY, name
        assert edges.min() >= 0
        assert edges.max() < num_nodes
    most = max(int(edges[1].bincount().max()) for _, _, edges in made)
    assert most == (5000 if quick else 100_000)


def as_sorted(edges, num_nodes, *, junk):
    """A graph as devices sort it, with slots that belong to nobody."""
    order = edges[1].argsort(stable=True)
    begin = torch.cat([torch.zeros(1).long(), edges[1].bincount(minlength=num_nodes).cumsum(0)])
    spare = torch.full((2,), junk)
    made = torch.cat([begin, edges[0][order], spare, order, spare])
    return Sorted(made.int(), num_nodes)


def test_a_lost_or_a_wrong_edge_is_seen_and_what_belongs_to_nobody_is_not():
    edges = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])
    found = as_sorted(edges, 3, junk=7)
    assert found.holds(edges, loops=False)
    assert found.is_like(as_sorted(edges, 3, junk=8))
    assert not found.holds(edges[:, :3], loops=False)
    other = edges.clone()
    other[0, 0] = 1
    assert not found.holds(other, loops=False)
    assert not found.is_like(as_sorted(other, 3, junk=7))
    # Of every node one loop, in place of those of nodes 1 and 2.
    with_loops = torch.tensor([[0, 2, 0, 1, 2], [1, 0, 0, 1, 2]])
    assert as_sorted(with_loops, 3, junk=0).holds(edges, loops=True)


def test_other_bits_the_second_time_are_a_failure():
    values = iter([torch.zeros(2), torch.tensor([0.0, 1e-30])])
    with pytest.raises(RuntimeError, match="other bits"):
        same_twice(lambda: next(values))


@pytest.mark.skipif(
    library_path("libgnnserve_simt.so") is None, reason="only an editable install builds it"
)
@pytest.mark.parametrize("wrong", [None, "aggregate", "attend"])
def test_a_heavy_row_that_is_wrong_is_seen(result, tmp_path, monkeypatch, wrong):
    star = next(heavy.graphs(quick=True))
    monkeypatch.setattr(heavy, "graphs", lambda _: [star])
    if wrong:
        simulated = heavy.simulated_kernels

        def off(path):
            found = simulated(path)
            right = found[wrong]

            def run(*arguments):
                out = right(*arguments)
                out[1] *= 1.001
                return out

            return found | {wrong: run}

        monkeypatch.setattr(heavy, "simulated_kernels", off)
    heavy.body(result, argparse.Namespace(dry=True, quick=True), plain=False)
    rows = failed(result, tmp_path)
    assert bool(rows) == bool(wrong)
    assert all("wide within" in row for row in rows)


def test_what_launching_takes_is_told_of_every_operator(result, tmp_path):
    try:
        launching.body(result, argparse.Namespace(dry=True, quick=True))
    finally:
        if simt := library_path("libgnnserve_simt.so"):
            simulated_kernels(str(simt))
    told = json.loads((tmp_path / "result.json").read_text())["host_us"]
    assert {"csr", "normalise", "aggregate", "head_dots", "attend"} < set(told)
    assert all(0 < row["min"] <= row["median"] for row in told.values())


class Engine:
    """Answers after `merged` requests; adds `off` where they ran as one."""

    def __init__(self, merged, off):
        self.merged, self.off, self.asked = merged, off, 0

    def graphs(self, _):
        return [SimpleNamespace(num_nodes=10, feature_dtype="uint8")]

    def snapshot(self):
        return SimpleNamespace(lane_restarts=0)

    def submit(self, call):
        assert isinstance(call.tensors["node_ids"], Tensor)
        self.asked += 1
        # Those asked one by one come first.
        merged = 1 if self.asked <= 16 else self.merged
        output = np.full((2, 2), 1 + self.off * (merged > 1), np.float32)
        answer = SimpleNamespace(output=output, record=SimpleNamespace(merged=merged))
        return SimpleNamespace(result=lambda: answer)


@pytest.mark.parametrize(
    ("merged", "off", "told"),
    [
        (3, 0.0, []),
        (3, 0.01, ["uint8: merged answers within 0.0001"]),
        (3, float("nan"), ["uint8: merged answers within 0.0001"]),
        (1, 0.0, ["uint8: requests were merged"]),
    ],
)
def test_a_merged_answer_that_is_another_one_is_seen(
    result, tmp_path, monkeypatch, merged, off, told
):
    @contextmanager
    def engine(*_, **__):
        yield Engine(merged, off), []

    monkeypatch.setattr(Bench, "engine", engine)
    monkeypatch.setattr(unions, "held", lambda *_: None)
    unions.unions(result, Bench(tmp_path, dry=True, quick=True), "uint8")
    assert failed(result, tmp_path) == told


def test_features_are_given_so_that_they_are_kept_as_wanted(tmp_path):
    bench = Bench(tmp_path, dry=True, quick=True)
    for kind in unions.KINDS:
        graph = unions.held(bench, kind)
        x = np.load(graph.file)["x"]
        assert bool((x == x.astype(np.uint8)).all()) == (kind == "uint8")
        assert (graph.feature_dtype, graph.hot_memory) == (
            "float16" if kind == "float16" else "float32", "off",
        )  # fmt: skip
