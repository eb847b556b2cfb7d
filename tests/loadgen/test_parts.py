"""The parts of the generator that need neither gevent nor a server."""

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng

from loadgen.inputs import make_tensors, makeable
from loadgen.measure import Sample, summarise
from loadgen.native import refuse_unsendable
from loadgen.options import DATA_VARIABLE, LoadOptions
from loadgen.plan import make_plan
from loadgen.show import progress_line, show_summary
from serve.errors import ConfigError, UnknownName
from serve.graphs.pool import GraphPool
from serve.interface import InputSlot, Interface, TensorSlot
from serve.recording import RecordedRequest, RecordingHeader
from serve.terminal import Console
from serve.wire.messages import decode_request
from serve.workload import GraphRef, PoolSpec, Trace, TraceHeader, TraceItem

POOL = PoolSpec(datasets=("pubmed",), count=5, scale=0.02, max_nodes=200, max_edges=1000)
OPTIONS = LoadOptions("host:1", "gcn", rate_hz=10.0, requests=12, pool=POOL)


EDGES = {"edge_index": (2, -1)}
INPUTS = {
    "gcn": {"x": (-1, 3), **EDGES},
    "gat": {"x": (-1, 7), **EDGES, "node_ids": (-1,)},
    "gine": {"edge_attr": (-1, 5), "batch": (-1,), **EDGES, "x": (-1, 2), "edge_weight": (-1,)},
    "points": {"x": (-1, 4), "batch": (-1,)},
}


class FakeServer:
    def slots(self):
        return 4

    def solo_s(self, model, num_nodes, num_edges):
        return 0.25

    def lone_s(self, message):
        return 0.5

    def graph(self, name, node_type):
        return 40, "a file"

    def sample_solo_s(self, model, spec, num_ids):
        if model == "points":
            raise ConfigError("model 'points' takes no graph")
        return num_ids / 100

    def models(self):
        return tuple(INPUTS)

    def inputs(self, model):
        if model not in INPUTS:
            raise UnknownName(f"unknown model '{model}'; the repository holds: gcn, gat")
        return INPUTS[model]


def test_requests_carry_the_graph_of_their_item():
    plan = make_plan(OPTIONS, FakeServer())
    assert len(plan.messages) == len(plan.trace.items) == 12
    for item, message in zip(plan.trace.items, plan.messages, strict=True):
        request = decode_request(message)
        assert request.model == "gcn"
        assert [tensor.name for tensor in request.inputs] == ["x", "edge_index"]
        assert request.inputs[0].shape == (item.num_nodes, 3)
        assert request.inputs[1].shape == (2, item.num_edges)
        x, edges = request.raws
        assert len(x) == item.num_nodes * 3 * 4
        assert np.frombuffer(edges, np.int64).max() < item.num_nodes
        assert not request.parameters


def test_requests_have_every_input_of_their_model():
    sizes = [GraphRef("random", 1, 9, 20), GraphRef("random", 2, 1, 0)]
    for ref in sizes:
        edges = GraphPool(PoolSpec(datasets=())).edges(ref)
        made = {
            model: make_tensors(makeable(model, shapes), ref.num_nodes, edges, default_rng(3))
            for model, shapes in INPUTS.items()
        }
        shapes = {name: array.shape for name, array in made["gine"].items()}
        count = ref.num_nodes, ref.num_edges
        assert shapes == {
            "x": (count[0], 2), "edge_index": (2, count[1]), "edge_weight": (count[1],),
            "edge_attr": (count[1], 5), "batch": (count[0],),
        }  # fmt: skip
        assert not made["gine"]["batch"].any()
        assert list(made["points"]) == ["x", "batch"]
        assert list(made["gat"]) == ["x", "edge_index"]


def test_a_mix_is_of_every_model_that_is_ready():
    plan = make_plan(replace(OPTIONS, workload="mix", requests=200), FakeServer())
    assert {item.model for item in plan.trace.items} == set(INPUTS)


class StrangeServer(FakeServer):
    """Two of its models take what the generator cannot make."""

    STRANGE = {"voxels": {"pos": (-1, 3)}, "texts": {"words": (-1,)}}  # noqa: RUF012

    def models(self):
        return (*INPUTS, *self.STRANGE)

    def inputs(self, model):
        return self.STRANGE.get(model) or super().inputs(model)


def test_a_mix_goes_without_a_model_only_when_that_is_asked_for():
    options = replace(OPTIONS, workload="mix", requests=200)
    with pytest.raises(ConfigError) as caught:
        make_plan(options, StrangeServer())
    said = str(caught.value)
    assert "model 'voxels' takes 'pos'" in said
    assert "model 'texts' takes 'words'" in said
    assert "to ask the others alone: --without voxels --without texts" in said
    plan = make_plan(replace(options, without=("voxels", "texts")), StrangeServer())
    assert {item.model for item in plan.trace.items} == set(INPUTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "mix", "without": ("gni",)}, "without gni: it is not one of gcn, gat"),
        ({"workload": "mix", "without": tuple(INPUTS)}, "no model is left"),
        ({"without": ("gcn",)}, "without gcn: only mix has several models"),
    ],
)
def test_a_model_can_be_left_out_only_where_it_is(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(replace(OPTIONS, **changes), FakeServer())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (-1, 3), "pos": (-1, 3)}, "model 'own' takes 'pos', which is not one of x, edge_"),
        ({"x": (-1, -1), **EDGES}, r"takes 'x' of shape \[-1, -1\]"),
        ({"x": (-1, 3), "edge_attr": (-1,)}, r"takes 'edge_attr' of shape \[-1\]"),
    ],
)
def test_inputs_that_cannot_be_made_are_named(shapes, message):
    with pytest.raises(ConfigError, match=message):
        makeable("own", shapes)


def test_a_model_that_is_not_there_is_refused_in_the_servers_words():
    with pytest.raises(UnknownName, match="unknown model 'gnn'; the repository holds: gcn, gat"):
        make_plan(replace(OPTIONS, workload="gnn"), FakeServer())


def test_equal_requests_are_encoded_once_and_a_plan_is_reproducible():
    plan, again = make_plan(OPTIONS, FakeServer()), make_plan(OPTIONS, FakeServer())
    assert len({id(message) for message in plan.messages}) == 5
    assert plan == again
    assert make_plan(replace(OPTIONS, seed=1), FakeServer()).trace != plan.trace


def test_a_target_in_the_trace_goes_into_the_request(tmp_path):
    path = tmp_path / "a.trace"
    make_plan(OPTIONS, FakeServer()).trace.with_targets(lambda item: 77).save(path)
    plan = make_plan(LoadOptions("host:1", trace=path, requests=2), FakeServer())
    assert len(plan.messages) == 2
    assert decode_request(plan.messages[0]).parameters == {"qos_target_us": 77}


def test_rho_gives_the_rate():
    options = replace(OPTIONS, rate_hz=None, rho=0.5)
    header = make_plan(options, FakeServer()).trace.header
    assert (header.rate_hz, header.mean_solo_s, header.lanes) == (8.0, 0.25, 4)
    header = make_plan(replace(options, end_to_end=True), FakeServer()).trace.header
    assert (header.rate_hz, header.mean_solo_s, header.lanes) == (4.0, 0.5, 4)


def test_a_trace_may_name_random_graphs(tmp_path):
    header = TraceHeader(workload="gat", seed=0, rate_hz=1.0, pool=PoolSpec(datasets=()))
    item = TraceItem(
        offset_ns=0, model="gat", dataset="random", index=3, num_nodes=1, num_edges=0, seed=0
    )
    Trace(header, (item,)).save(tmp_path / "r.trace")
    plan = make_plan(LoadOptions("host:1", trace=tmp_path / "r.trace"), FakeServer())
    x, edges = decode_request(plan.messages[0]).raws
    assert (len(x), len(edges)) == (28, 0)


def test_a_trace_from_other_graphs_is_refused(tmp_path):
    trace = make_plan(OPTIONS, FakeServer()).trace
    item = msgspec.structs.replace(trace.items[0], num_edges=trace.items[0].num_edges + 2)
    Trace(trace.header, (item,)).save(tmp_path / "x.trace")
    with pytest.raises(ConfigError, match="another scale, seed or folder"):
        make_plan(LoadOptions("host:1", trace=tmp_path / "x.trace"), FakeServer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho": 1.0}, "either a rate or rho"),
        ({"rate_hz": None}, "either a rate or rho"),
        ({"end_to_end": True}, "only rho needs solo times"),
        ({"requests": None}, "give a duration"),
        ({"speed": 2.0}, "speed 2: only a trace to replay has one"),
        ({"profile": "ramp:0-2"}, "give a duration too"),
        ({"in_flight": 3}, "either a rate or rho, or requests in flight"),
        ({"rate_hz": None, "in_flight": 0}, "in: 0 must be finite"),
        ({"rate_hz": None, "in_flight": 2, "arrivals": "even"}, "arrivals even: has no meaning"),
        ({"tenant": "a=0"}, "tenant 'a=0': 'a=0' is not NAME=WEIGHT"),
        ({"tenant": "a,b,a"}, "is not NAME=WEIGHT"),
        ({"priority": -1}, "priority: -1 must be at least 0"),
        ({"target_ms": 0.0}, "target: 0.0 must be finite"),
        ({"token_files": ("b=file",), "tenant": "a"}, "no request is of tenant 'b'"),
        ({"arrivals": "steady"}, "arrivals 'steady' is not one of poisson"),
        ({"rate_hz": 0.0}, "rate: 0.0 must be finite and more than 0"),
        ({"rate_hz": float("nan")}, "rate: nan must be finite and more than 0"),
        ({"duration_s": -1.0}, "duration: -1.0 must be finite and more than 0"),
        ({"requests": None, "duration_s": 1e-9}, "no request falls into this run"),
    ],
)
def test_options_that_make_no_run(change, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(replace(OPTIONS, **change), FakeServer())


def test_a_mix_has_its_weights():
    options = replace(OPTIONS, workload="gcn=3,gat=1", requests=400)
    models = [item.model for item in make_plan(options, FakeServer()).trace.items]
    assert set(models) == {"gcn", "gat"}
    assert models.count("gcn") == 300
    with pytest.raises(UnknownName, match="unknown model 'nobody'"):
        make_plan(replace(options, workload="gcn=3,nobody=1"), FakeServer())


def test_requests_are_of_tenants_with_a_priority_and_a_target():
    options = replace(OPTIONS, tenant="a=3,b", priority=2, target_ms=1.5, requests=400)
    plan = make_plan(options, FakeServer())
    found = [decode_request(message).parameters for message in plan.messages]
    tenants = [one["tenant"] for one in found]
    assert set(tenants) == {"a", "b"}
    assert 250 < tenants.count("a") < 350
    assert {(one["priority"], one["qos_target_us"]) for one in found} == {(2, 1500)}
    assert make_plan(options, FakeServer()) == plan


def test_tokens_are_read_by_tenant(tmp_path):
    (tmp_path / "a").write_text("secret\n")
    (tmp_path / "empty").write_text("\n")
    files = (f"t={tmp_path / 'a'}", str(tmp_path / "a"))
    assert replace(OPTIONS, token_files=files).tokens() == {"t": "secret", "": "secret"}
    for name, told in (("empty", "it holds no token"), ("absent", "cannot be read")):
        with pytest.raises(ConfigError, match=told):
            replace(OPTIONS, token_files=(str(tmp_path / name),)).tokens()


def test_the_compiled_sender_refuses_by_name_what_it_does_not_do():
    for change, told in (
        ({"token_files": ("x",)}, "--token-file"),
        ({"ca": Path("x")}, "--ca"),
        ({"in_flight": 2}, "--requests with --in-flight"),
    ):
        with pytest.raises(ConfigError, match=f"--native does not take {told}"):
            refuse_unsendable(replace(OPTIONS, **change))
    refuse_unsendable(OPTIONS)


def test_a_recording_asks_for_graphs_of_its_own_and_of_the_server(tmp_path):
    rows = [
        RecordingHeader(started_unix_ns=0),
        RecordedRequest(at_ns=5, model="gcn", nodes=9, edges=31, tenant="a"),
        RecordedRequest(at_ns=9, model="gat", nodes=50, graph="g", ids=4, fanouts="3,1"),
        RecordedRequest(at_ns=25, model="gine", nodes=3),
    ]
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    plan = make_plan(LoadOptions("host:1", trace=path, speed=4), FakeServer())
    assert [item.offset_ns for item in plan.trace.items] == [0, 1, 5]
    brought, by_ids, alone = map(decode_request, plan.messages)
    assert (brought.model, brought.parameters) == ("gcn", {"tenant": "a"})
    assert [tensor.shape for tensor in brought.inputs] == [(9, 3), (2, 31)]
    assert by_ids.inputs[0].shape == (4,)
    assert np.frombuffer(by_ids.raws[0], np.int64).max() < 40
    assert (by_ids.parameters["graph"], by_ids.parameters["fanouts"]) == ("g", "3,1")
    assert {tensor.name: tensor.shape for tensor in alone.inputs}["edge_attr"] == (0, 5)
    with pytest.raises(ConfigError, match="a trace has its own times, tenants"):
        make_plan(LoadOptions("host:1", trace=path, tenant="b"), FakeServer())


BY_IDS = replace(OPTIONS, graph="g", node_type="paper", ids="3-9", fanouts="4,2", requests=300)


def test_requests_by_ids_name_graph_ids_and_fanouts(tmp_path):
    plan = make_plan(BY_IDS, FakeServer())
    assert plan == make_plan(BY_IDS, FakeServer())
    seen = set()
    for item, message in zip(plan.trace.items, plan.messages, strict=True):
        request = decode_request(message)
        (tensor,) = request.inputs
        assert (tensor.name, tensor.shape) == ("node_ids.paper", (item.num_nodes,))
        ids = np.frombuffer(request.raws[0], np.int64)
        assert 0 <= ids.min() <= ids.max() < 40
        assert request.parameters == {"graph": "g", "fanouts": "4,2", "seed": item.index}
        seen.add(len(ids))
    assert seen == set(range(3, 10))
    assert plan.trace.header.sources == {"g": "a file"}
    plan.trace.save(tmp_path / "a.trace")
    again = make_plan(LoadOptions("host:1", trace=tmp_path / "a.trace"), FakeServer())
    assert again == plan


def test_rho_of_requests_by_ids_follows_from_their_number():
    options = replace(BY_IDS, ids="50", rate_hz=None, rho=0.5)
    header = make_plan(options, FakeServer()).trace.header
    assert (header.rate_hz, header.mean_solo_s) == (4.0, 0.5)


class Shrunk(FakeServer):
    def graph(self, name, node_type):
        return 39, ""


def test_requests_by_ids_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"takes no graph\n.*--without points"):
        make_plan(replace(BY_IDS, workload="mix"), FakeServer())
    path = tmp_path / "a.trace"
    make_plan(BY_IDS, FakeServer()).trace.save(path)
    with pytest.raises(ConfigError, match="asks for nodes below 40, the server has 39"):
        make_plan(LoadOptions("host:1", trace=path), Shrunk())
    trace = Trace.load(path)
    other = msgspec.structs.replace(trace.items[0], dataset="h")
    Trace(trace.header, (other,)).save(path)
    with pytest.raises(ConfigError, match=r"graph h/.* the trace is for nodes of 'g'"):
        make_plan(LoadOptions("host:1", trace=path), FakeServer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": ""}, "node-type paper: has no meaning without a graph"),
        ({"ids": "0"}, "ids: '0' is neither a number from 1"),
        ({"ids": "9-3"}, "ids: '9-3' is neither"),
        ({"ids": "some"}, "ids: 'some' is neither"),
        ({"ids": "1-2000000"}, "ids: '1-2000000' is neither"),
        ({"trace": Path("t"), "rate_hz": None}, "graph g: a trace says"),
        ({"data": Path("d")}, "data d: has no meaning with graph g"),
    ],
)
def test_options_of_requests_by_ids_that_contradict(change, message, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, "other")
    with pytest.raises(ConfigError, match=message):
        make_plan(replace(BY_IDS, **change), FakeServer())


def test_a_folder_that_the_environment_names_is_for_other_runs(monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, "d")
    assert make_plan(replace(BY_IDS, data=Path("d")), FakeServer()) == make_plan(
        BY_IDS, FakeServer()
    )


def test_a_file_of_one_graph_is_what_requests_are_cut_from(tmp_path):
    ring = np.arange(300)
    path = tmp_path / "ring_topology.npz"
    np.savez(path, num_nodes=300, edge_index=[ring, (ring + 1) % 300])
    plan = make_plan(replace(OPTIONS, data=path), FakeServer())
    assert {item.dataset for item in plan.trace.items} == {"ring"}
    assert plan.trace.header.sources == {"ring": "file ring_topology.npz"}
    assert all(item.num_edges <= 2 * item.num_nodes for item in plan.trace.items)
    saved = tmp_path / "trace.jsonl"
    plan.trace.save(saved)
    again = LoadOptions("host:1", trace=saved, data=path)
    assert make_plan(again, FakeServer()).messages == plan.messages


def sample(latency_ms, target_us=10_000, status="OK", lag_ms=0.1, model="gcn", due_s=1.0):
    return Sample(
        model=model,
        due_ns=int(due_s * 1e9),
        lag_ns=int(lag_ms * 1e6),
        latency_ns=int(latency_ms * 1e6),
        status=status,
        message="" if status == "OK" else f"why {status}",
        target_us=target_us,
        late_by_server=latency_ms > 15,
    )


HEADER = TraceHeader(
    workload="mix", seed=0, rate_hz=2.0, rho=0.3, lanes=2, sources={"cora": "file"}
)
SAMPLES = [
    sample(5, due_s=0.5),
    sample(12, due_s=1),
    sample(20, model="gat", due_s=1.5),
    sample(1, target_us=None, model="gat", due_s=2),
    sample(9, status="UNAVAILABLE", due_s=2),
]


def summary(samples=SAMPLES, scheduled=5, cpu_s=0.1):
    return summarise("h:1", HEADER, samples, scheduled=scheduled, elapsed_s=2.0, cpu_s=cpu_s)


def test_summary_counts():
    seen = summary()
    assert (seen.requests, seen.answered, seen.violations, seen.violations_by_server) == (
        5,
        4,
        2,
        1,
    )
    assert (seen.violation_rate, seen.missed_rate) == (0.5, 0.6)
    assert (seen.offered_hz, seen.answered_hz) == (2.5, 2.0)
    assert seen.by_status == {"OK": 4, "UNAVAILABLE": 1}
    assert seen.messages == {"UNAVAILABLE": "why UNAVAILABLE"}
    # Latencies cover answers only, and their ratios only those with a target.
    assert seen.latency_ms.mean == pytest.approx(9.5)
    assert seen.latency_over_qt.p50 == pytest.approx(1.2)
    assert seen.latency_over_qt.max == pytest.approx(2.0)
    assert {model: row.violations for model, row in seen.by_model.items()} == {"gcn": 1, "gat": 1}
    assert seen.generator_cpu == pytest.approx(0.05)
    assert seen.warnings == []


def test_a_run_that_measured_itself_says_so():
    seen = summary([sample(5, lag_ms=8)] * 3, scheduled=4, cpu_s=1.9)
    assert "8.0 ms late" in seen.warnings[0]
    assert "95% of a core" in seen.warnings[1]
    assert "1 requests" in seen.warnings[2]


def test_nothing_seen_is_a_summary_too():
    seen = summary([])
    assert (seen.requests, seen.violation_rate, seen.latency_ms.p99) == (0, 0.0, 0.0)


def test_the_tables_show_what_was_seen():
    text = io.StringIO()
    show_summary(summary([*SAMPLES, sample(1, lag_ms=400)]), Console(file=text, width=100))
    shown = text.getvalue()
    for word in ("mix to h:1: 6 of 5", "ρ 0.3 on 2 slots", "graph cora: file", "why UNAVAILABLE",
                 "latency ÷ target", "send lag", "warning: ",
                 "late answers: 40.0% at the client"):  # fmt: skip
        assert word in shown
    line = progress_line(1.0, Trace(HEADER, ()), 7, SAMPLES)
    assert "sent 7 of 0 · in flight 2 · recent: late 50.0%, failed 1" in line


def test_a_model_that_declares_its_inputs_gets_them():
    links = InputSlot("edge_index", "INT64", (2, "E"), index=("N",))
    kinds = InputSlot("edge_type", "INT64", ("E",), low=2, high=5)
    output = TensorSlot("y", "FP32", ("N",))
    declared = Interface((InputSlot("x", "FP32", ("N", 3)), links, kinds), (output,))
    ref = GraphRef("random", 1, 9, 20)
    edges = GraphPool(PoolSpec(datasets=())).edges(ref)
    made = make_tensors(makeable("own", declared), ref.num_nodes, edges, default_rng(3))
    assert {name: array.shape for name, array in made.items()} == {
        "x": (9, 3), "edge_index": (2, 20), "edge_type": (20,),
    }  # fmt: skip
    np.testing.assert_array_equal(made["edge_index"], edges)
    assert set(made["edge_type"]) == {2, 3, 4}


def test_two_kinds_of_nodes_share_the_graph():
    slots = (
        InputSlot("x.a", "FP32", ("N.a", 3)),
        InputSlot("x.b", "FP32", ("N.b", 3)),
        InputSlot("edge_index.a__to__b", "INT64", (2, "E"), index=("N.a", "N.b")),
    )
    declared = Interface(slots, (TensorSlot("y", "FP32", ("N.a",)),))
    made = make_tensors(declared, 9, np.zeros((2, 20), np.int64), default_rng(3))
    assert (made["x.a"].shape, made["x.b"].shape) == ((5, 3), (4, 3))
    links = made["edge_index.a__to__b"]
    assert links.shape == (2, 20)
    assert links[0].max() < 5
    assert links[1].max() < 4
