"""Measure what one request costs beside the model: latency, and processor time.

    python -m bench.host.requests QUESTION [--quick] [--repeats N]

Requests go one at a time from our client to a real server, and as the same bytes to a bare gRPC
echo (``bench.kit.echoes``), in turns. QUESTION is

- overhead: the demo's GCN on graphs of 100 to 10,000 nodes, served, called directly on one thread
  with a lane's allocator, the echo, and the native front that runs nothing (`front`), all at one
  pace. `added` is served − direct; `beyond` is what of that the echo would not take too; the
  stages are the server's own account.
- ways: a model that copies one column, asked in the message, through shared memory and by node
  ids, with 10 KB to 50 MB. `added` is what the client waits beyond the run on the lane; ratios are
  to the echo beside it. Then processor time of the server's main process and the client, without
  lanes; `beyond` is what both take more than the echo's.
"""

import argparse
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.kit.echoes import echo_server
from bench.kit.measure import elapsed_us, in_turns, percentiles, ratios, spread
from bench.kit.processes import processor_ns
from bench.kit.result import ROOT
from bench.kit.script import Script, Table
from bench.kit.servers import ServerProcess
from serve.client import Client
from serve.commands.tuning import tune_process
from serve.lane.models.loader import load_model
from serve.models.repository import find
from serve.models.writer import write_model
from serve.wire.messages import encode_request

FEATURES, EDGES_PER_NODE = 32, 10
NODE_BYTES = 4 * FEATURES + 2 * 4 * EDGES_PER_NODE
MESSAGE_BYTES = 128 << 20
#: The graph the server holds, and the in-neighbours read of each node asked for.
HELD_NODES, FANOUT = 400_000, 10
#: Lanes keep freed memory in proportion to the budget; the usual small one of tests is not typical.
SECTIONS: dict[str, dict[str, object]] = {
    "server": {"max_message": "128 MiB", "reject_nonfinite": True},
    "device": {"memory_budget": "8 GiB"},
}
#: Next to no work: what is measured is the way there and back.
MODEL = """
import torch

class Score(torch.nn.Linear):
    def forward(self, x, edge_index):
        return super().forward(x)
"""
#: Columns of the report's database, ns.
STAGES = ("queue", "prepare", "run", "answer", "latency", "quet")
WAYS = {
    "request": "{bytes:,} B", "way": "{way}", "added, µs": "{added_us[p50]:,.0f}",
    "MB/s": "{megabytes_per_s:,.0f}", "÷ echo": "{over_echo[p50]:.2f}",
    "server, µs": "{server_us:,.0f}", "client": "{client_us:,.0f}",
    "beyond the echo": "{beyond_us:,.0f}",
}  # fmt: skip
#: Processor time of server and client in µs.
Used = tuple[float, float]
SCRIPTS = {
    "overhead": Script(
        "overhead",
        full={"repeats": 400, "nodes": (100, 1_000, 10_000)},
        quick={"repeats": 2, "nodes": (100,)},
        tables=[
            Table("Served, direct, and a bare gRPC echo, µs", "rows", {
                "nodes": "{nodes:,}", "figure": "{figure}", "p50": "{p50:,.0f}",
                "p99": "{p99:,.0f}",
            })
        ],
    ),
    "ways": Script(
        "ways",
        full={
            "repeats": 200, "rounds": 5,
            "sizes": (10_000, 100_000, 1_000_000, 10_000_000, 50_000_000),
        },
        quick={"repeats": 2, "rounds": 2, "sizes": (10_000,)},
        tables=[Table("Added to a run, and processor time of a request", "rows", WAYS)],
    ),
}  # fmt: skip


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Return percentiles of every stage by the number of nodes, in µs."""
    torch.set_num_threads(1)
    tune_process()  # without a lane's allocator the direct call measures glibc's defaults
    direct = load_model(find(ROOT / "configs" / "models", "gcn"))
    taken: dict[int, dict[str, list[Any]]] = {}
    with (
        echo_server() as echo,
        echo_server("native") as front,
        tempfile.TemporaryDirectory() as folder,
    ):
        server = ServerProcess(Path(folder), sections=SECTIONS, usual_calibrations=True)
        with server, Client(server.target) as client:
            for nodes in options.nodes:
                echoes = {"echo": echo.call(), "front": front.call()}
                taken[nodes] = paced(client, direct.run, echoes, nodes, options.repeats)
            server.stop()
        stages = stages_by_uid(server.database)
    rows = [
        {"nodes": nodes, "figure": figure, **found}
        for nodes, times in taken.items()
        for figure, found in figures(times, stages).items()
    ]
    return {"model": "gcn", "rows": rows}


def paced(
    client: Client,
    direct: Callable[[Any], object],
    echoes: Mapping[str, Callable[[bytes], object]],
    nodes: int,
    repeats: int,
) -> dict[str, list[Any]]:
    """Return uids and µs of each way, ten by ten, all at the pace of the served requests.

    A core that was idle for a moment is slower for the next, and a hot loop would flatter what the
    server is compared with.
    """
    tensors = random_graph(nodes)
    edges = tensors["edge_index"].astype(np.int64)
    inputs = {"x": torch.from_numpy(tensors["x"]), "edge_index": torch.from_numpy(edges)}
    message = encode_request("gcn", tensors)
    times: dict[str, list[Any]] = {name: [] for name in ("uid", "client", "direct", *echoes)}
    for number in range(-1, max(1, repeats // 10)):
        found: dict[str, list[Any]] = {name: [] for name in times}
        for _ in range(10):
            started_ns = time.perf_counter_ns()
            answer = client.infer("gcn", x=tensors["x"], edge_index=edges)
            found["client"].append((time.perf_counter_ns() - started_ns) / 1e3)
            found["uid"].append(answer.qos.request_uid)
        for pause_us in found["client"]:
            direct_us = elapsed_us(direct, inputs)
            found["direct"].append(direct_us)
            time.sleep(max(0.0, pause_us - direct_us) / 1e6)
        for name, echo in echoes.items():
            for pause_us in found["direct"]:
                time.sleep(pause_us / 1e6)
                found[name].append(elapsed_us(echo, message))
        if number >= 0:
            for name, values in found.items():
                times[name] += values
    return times


def stages_by_uid(database: Path) -> dict[str, tuple[float, ...]]:
    """Return the server's account of every request in µs, in the order of `STAGES`."""
    columns = ", ".join(f"{stage}_ns / 1e3" for stage in STAGES)
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(f"SELECT request_uid, {columns} FROM request").fetchall()
    return {uid: tuple(values) for uid, *values in rows}


def figures(
    times: dict[str, list[Any]], stages: Mapping[str, tuple[float, ...]]
) -> dict[str, dict[str, float]]:
    """Return percentiles of what the client saw and of the server's stages."""
    kept = dict(zip(STAGES, np.array([stages[uid] for uid in times["uid"]]).T, strict=True))
    handed = kept["latency"] - kept["quet"] - kept["run"] - kept["answer"]
    values = {name: np.array(times[name]) for name in ("client", "direct", "echo", "front")}
    values["transport"] = values["client"] - kept["latency"]
    values |= {name: kept[name] for name in ("queue", "prepare", "run")}
    values |= {"hand-over": handed, "answer": kept["answer"]}
    found = {name: percentiles(each, (5, 50, 99)) for name, each in values.items()}
    added = {q: round(found["client"][q] - found["direct"][q], 1) for q in found["client"]}
    beyond = {q: round(added[q] - found["echo"][q], 1) for q in added}
    return found | {"added": added, "beyond": beyond}


def ways(options: argparse.Namespace) -> dict[str, Any]:
    """Return what each way adds to a run, and its processor time, by the size of the request."""
    rows = []
    with echo_server() as echo, ExitStack() as stack:
        asked = stack.enter_context(score_ways())
        call = echo.call()
        for size in options.sizes:
            request = Request(size)
            # Large requests are repeated less often; the machine repeats them better.
            repeats = max(2, min(options.repeats, options.repeats * 1_000_000 // (2 * size)))
            added = {way: partial(added_us, ask, request) for way, (_, ask) in asked.items()}
            added["echo"] = partial(elapsed_us, call, request.message)
            times = in_turns(added, repeats, warm_up=max(2, repeats // 10))
            asks = {way: (pid, partial(ask, request)) for way, (pid, ask) in asked.items()}
            asks["echo"] = echo.pid, partial(call, request.message)
            used = in_turns(
                {way: partial(used_us, *one, repeats) for way, one in asks.items()},
                options.rounds,
            )
            rows += [
                {"bytes": size, "way": way}
                | latency(times[way], times["echo"], len(request.message))
                | processor_time(used[way], used["echo"])
                for way in added
            ]
    return {"rows": rows}


def latency(added: list[float], echo: list[float], message_bytes: int) -> dict[str, Any]:
    """Return percentiles of what a way adds, and of its ratio to the echo beside it."""
    found = percentiles(added, (25, 50, 75, 99), 3)
    return {
        "added_us": found,
        "megabytes_per_s": round(message_bytes / found["p50"], 1),
        "over_echo": percentiles(ratios(added, echo), (25, 50, 75, 99), 3),
    }


def processor_time(used: list[Used], echo: list[Used]) -> dict[str, float]:
    """Return medians of server and client, and what both take more than the echo's."""
    beyond = [sum(ours) - sum(bare) for ours, bare in zip(used, echo, strict=True)]
    middle, least, most = spread(beyond, 1)
    return {
        "server_us": round(median(server for server, _ in used), 1),
        "client_us": round(median(client for _, client in used), 1),
        "beyond_us": middle, "beyond_least_us": least, "beyond_most_us": most,
    }  # fmt: skip


class Request:
    """One request in every form: tensors of about `size` bytes, a message, node ids."""

    def __init__(self, size: int) -> None:
        nodes = size // NODE_BYTES
        self.tensors = random_graph(nodes)
        self.message = encode_request("score", self.tensors)
        ids = np.random.default_rng(1).integers(0, HELD_NODES, max(1, nodes // (FANOUT + 1)))
        self.by_ids: dict[str, Any] = {"graph": "held", "node_ids": ids, "fanouts": [FANOUT]}


#: Server's process id, and what asks it.
Way = tuple[int, Callable[[Request], Any]]


@contextmanager
def score_ways() -> Iterator[dict[str, Way]]:
    """Yield three ways to ask a server for `score`, by name."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_score_model(folder / "models")
        hold_graph(folder / "held.npz")
        server = stack.enter_context(
            ServerProcess(
                folder,
                repository=folder / "models",
                sections=SECTIONS,
                graphs=({"name": "held", "file": "held.npz"},),
            )
        )
        plain = stack.enter_context(Client(server.target, max_message_bytes=MESSAGE_BYTES))
        shared = stack.enter_context(Client(server.target, shared_memory_bytes=MESSAGE_BYTES))
        yield {
            "plain": (server.pid, lambda one: plain.infer("score", **one.tensors)),
            "shared": (server.pid, lambda one: shared.infer("score", **one.tensors)),
            "ids": (server.pid, lambda one: plain.infer("score", **one.by_ids)),
        }


def added_us(ask: Callable[[Request], Any], request: Request) -> float:
    """Return what the client waits beyond the run on the lane."""
    started_ns = time.perf_counter_ns()
    answer = ask(request)
    taken_us: float = (time.perf_counter_ns() - started_ns) / 1e3 - answer.qos.run_us
    return taken_us


def used_us(pid: int, ask: Callable[[], object], repeats: int) -> Used:
    """Return processor time of the process and of this one, in µs a request."""
    server_ns, client_ns = processor_ns(pid), time.process_time_ns()
    for _ in range(repeats):
        ask()
    taken_ns = processor_ns(pid) - server_ns, time.process_time_ns() - client_ns
    return taken_ns[0] / repeats / 1e3, taken_ns[1] / repeats / 1e3


def random_graph(nodes: int) -> dict[str, Any]:
    """Return x float32 [N, F] and edge_index int32 [2, E]."""
    rng = np.random.default_rng(nodes)
    return {
        "x": rng.standard_normal((nodes, FEATURES), dtype=np.float32),
        "edge_index": rng.integers(0, nodes, (2, EDGES_PER_NODE * nodes), dtype=np.int32),
    }


def write_score_model(repository: Path) -> None:
    """Write a model named `score` that does next to nothing."""
    score = torch.nn.Linear(FEATURES, 1)
    sizes = {"in_features": FEATURES, "out_features": 1}
    model = write_model(repository, "score", score, factory="./model.py:Score", args=sizes)
    (model / "model.py").write_text(MODEL)


def hold_graph(path: Path) -> None:
    """Write a random graph for the server to hold."""
    np.savez(path, num_nodes=HELD_NODES, **random_graph(HELD_NODES))


QUESTIONS = {"overhead": overhead, "ways": ways}

if __name__ == "__main__":
    question = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in QUESTIONS else "overhead"
    SCRIPTS[question].main(QUESTIONS[question], __doc__)
