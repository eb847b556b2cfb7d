"""Both fronts give the same answers and refusals for models that declare their inputs."""

import inspect
import shutil

import grpc
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.kit import gallery, padded_models
from serve.commands.import_model import Source, import_model
from serve.graphs.random_inputs import declared_inputs
from serve.interface import DTYPES
from serve.lane.model_importing import read_model
from serve.pb import grpc_service_pb2 as pb
from serve.wire.messages import decode_response
from tests.server import kinds
from tests.server.test_fronts_agree import (
    Framed,
    both_fronts,
    decoded,
    doubled,
    outcome,
    sent_on_a_stream,
    set_raw,
    swapped,
)

#: The model of every datatype; pooled by a batch; a dict of types; one that returns two tensors,
#: of which one may go in again.
MODELS = ("kinds", "molecules", "to_hetero", "recurrent")
#: Attention within graphs, with the short form of inputs and with a declaration.
PADDED = ("padded", "padded_short")
WIRE = {dtype: name for name, dtype in DTYPES.items()}


def interface(name):
    return kinds.declared_by(kinds.KINDS) if name == "kinds" else gallery.described(name)


@pytest.fixture(scope="module")
def fronts(tmp_path_factory, trouble):
    for name in (*MODELS[1:], "schnet"):
        gallery.write(trouble.root, name)
    folder = tmp_path_factory.mktemp("kinds")
    gps = gallery.Entry(
        "",
        ("x FP32 [N, 8]", "edge_index INT64 [2, E] index=N", "batch INT64 [N] index=G default=0"),
        ("y FP32 [N, 8]",),
    )
    for name, entry, build in (
        ("kinds", kinds.KINDS, kinds.build),
        ("pooled", kinds.POOLED, kinds.build_pooled),
        ("padded", gps, padded_models.Gps),
        ("padded_short", None, padded_models.Gps),
    ):
        torch.save(build().state_dict(), folder / "weights.pt")
        source = Source(
            factory=f"{inspect.getfile(build)}:{build.__name__}",
            weights=folder / "weights.pt",
            args={},
            inputs=("x", "edge_index", "batch") if entry is None else (),
            declaration="" if entry is None else gallery.declaration(entry),
        )
        import_model(
            trouble.root, name, source, lambda *_: None, read=read_model, trial=gallery.tried
        )
    with both_fronts(folder, trouble.root) as found:
        yield found
    for name in (*MODELS, "schnet", "pooled", *PADDED):
        shutil.rmtree(trouble.root / name)


def message(name, counts, seed, *, narrow=False, leave_out=0):
    """A request of these counts; the bits of `leave_out` say which optional inputs are left out."""
    declared = interface(name)
    rng = np.random.default_rng(seed)
    arrays = declared_inputs(
        declared, counts, rng, graphs=lambda things: np.arange(things) * 3 // max(1, things)
    )
    found = pb.ModelInferRequest(model_name=name, id="one")
    optional = [slot.name for slot in declared.inputs if slot.optional]
    for slot in declared.inputs:
        if slot.optional and leave_out >> optional.index(slot.name) & 1:
            continue
        array = arrays[slot.name]
        if narrow and slot.index:
            array = array.astype(np.int32)
        found.inputs.add(name=slot.name, datatype=WIRE[array.dtype.name], shape=array.shape)
        found.raw_input_contents.append(array.tobytes())
    return found


def counts_of(name, sizes):
    return tuple(sizes[: len(interface(name).counts)])


@st.composite
def bends(draw):
    """One change of a message, of any of its tensors."""
    number = draw(st.integers(0, 12))
    content, at = draw(st.binary(min_size=1, max_size=8)), draw(st.integers(0, 400))

    def of_input(change):
        def apply(m):
            change(m.inputs[number % len(m.inputs)])

        return apply

    def overwrite(raw):
        start = at % max(1, len(raw))
        raw[start : start + len(content)] = content[: len(raw) - start]

    def add_to_shape(one):
        if one.shape:
            one.shape[at % len(one.shape)] += content[0] % 5 - 2

    def leave_out(m):
        if len(m.inputs) > 1:
            del m.inputs[number % len(m.inputs)]
            if m.raw_input_contents:
                del m.raw_input_contents[number % len(m.raw_input_contents)]

    wanted = draw(st.sampled_from(["y", "z", "papers", "h_next", "author", "paper", "output"]))
    return draw(
        st.sampled_from(
            [
                lambda m: set_raw(number % max(1, len(m.raw_input_contents)), overwrite)(m),
                lambda m: set_raw(number % max(1, len(m.raw_input_contents)), overwrite)(m),
                of_input(lambda one: setattr(one, "datatype", [*DTYPES, "BF16", ""][at % 11])),
                of_input(lambda one: setattr(one, "name", f"{one.name}s")),
                of_input(add_to_shape),
                leave_out, swapped, doubled,
                lambda m: m.outputs.add(name=wanted), lambda m: m.outputs.add(name=wanted),
            ]
        )
    )  # fmt: skip


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(MODELS), st.integers(0, 9),
    st.lists(st.sampled_from([0, 1, 2, 5, 30]), min_size=5, max_size=5),
    st.booleans(), st.integers(0, 63), st.lists(bends(), max_size=2),
)  # fmt: skip
def test_random_messages(fronts, name, seed, sizes, narrow, leave_out, changes):
    calls, *_ = fronts
    try:
        sent = message(name, counts_of(name, sizes), seed, narrow=narrow, leave_out=leave_out)
    except ValueError:  # edges between nodes of which there are none
        sent = message(name, counts_of(name, (3,) * 5), seed)
    for change in changes:
        change(sent)
    content = sent.SerializeToString()
    python, native = (outcome(call, content) for call in calls)
    assert native == python


@pytest.mark.parametrize("name", MODELS)
def test_ordinary_messages_are_staged_however_large_they_are(fronts, name):
    calls, server, _ = fronts
    counts = server._front._front.counts
    outputs = [slot.name for slot in interface(name).outputs]
    for number, size in enumerate((4, 40, 9_000)):
        for narrow in (False, True):
            sent = message(name, counts_of(name, (size,) * 5), number, narrow=narrow)
            if number == 1:
                sent.outputs.add(name=outputs[-1])
            before = counts()["plain"]
            python, native = (outcome(call, sent.SerializeToString()) for call in calls)
            assert native == python
            told = native[3]
            assert list(told) == (outputs[-1:] if number == 1 else outputs)
            assert counts()["plain"] == before + 1


@pytest.mark.parametrize("graphs", [[60], [1] * 60, [20, 3, 37], [0, 30, 0, 30], None])
@pytest.mark.parametrize("narrow", [False, True])
def test_pairs_of_things_in_one_graph_are_counted_alike(fronts, graphs, narrow):
    calls, server, _ = fronts
    declared, rng = interface("schnet"), np.random.default_rng(0)
    arrays = declared_inputs(declared, (60,), rng)
    batch = np.repeat(np.arange(len(graphs or [])), graphs or [])
    arrays["batch"] = rng.permutation(batch).astype(np.int32 if narrow else np.int64)
    sent = pb.ModelInferRequest(model_name="schnet", id="one")
    for name in ("z", "pos", "batch") if graphs else ("z", "pos"):
        array = arrays[name]
        sent.inputs.add(name=name, datatype=WIRE[array.dtype.name], shape=array.shape)
        sent.raw_input_contents.append(array.tobytes())
    whole = pb.ModelInferRequest()
    whole.CopyFrom(sent)
    if graphs:
        whole.raw_input_contents[2] = bytes(len(sent.raw_input_contents[2]))
    before = server._front._front.counts()["plain"]
    answers = [decode_response(call(sent.SerializeToString())) for call in calls]
    assert decoded(answers[0]) == decoded(answers[1])
    assert server._front._front.counts()["plain"] == before + 1
    python, native = (answer.parameters["pmc_estimate_bytes"] for answer in answers)
    assert native == python
    one_graph = decode_response(calls[1](whole.SerializeToString())).parameters
    share = native / one_graph["pmc_estimate_bytes"]
    assert share == 1 if graphs in (None, [60]) else share < 0.9


@pytest.mark.parametrize(
    ("name", "narrow"), [("padded", False), ("padded", True), ("padded_short", False)]
)
def test_padding_is_counted_alike(fronts, name, narrow):
    calls, server, _ = fronts
    rng = np.random.default_rng(0)
    estimates = []
    for graphs in ([12] * 10, [20] + [10] * 10, [100] + [1] * 20, [1] * 120, [0, 60, 0, 60]):
        batch = np.repeat(np.arange(len(graphs)), graphs)
        arrays = {
            "x": rng.random((120, 8), np.float32),
            "edge_index": rng.integers(0, 120, (2, 300)),
            "batch": batch.astype(np.int32 if narrow else np.int64),
        }
        sent = pb.ModelInferRequest(model_name=name, id="one")
        for key, array in arrays.items():
            sent.inputs.add(name=key, datatype=WIRE[array.dtype.name], shape=array.shape)
            sent.raw_input_contents.append(array.tobytes())
        before = server._front._front.counts()["plain"]
        answers = [decode_response(call(sent.SerializeToString())) for call in calls]
        assert decoded(answers[0]) == decoded(answers[1])
        assert server._front._front.counts()["plain"] == before + 1
        python, native = (answer.parameters["pmc_estimate_bytes"] for answer in answers)
        assert native == python
        estimates.append(native)
        for answer in answers:
            assert answer.parameters["pmc_measured_bytes"] <= native
    even, rather, uneven, alone, _ = estimates
    assert alone < even < rather < uneven
    assert uneven > 5 * even


@pytest.mark.parametrize("num_nodes", [12, 60_000])
@pytest.mark.parametrize("name", PADDED)
def test_nodes_of_a_graph_apart_are_refused_alike_where_they_must_be_together(
    fronts, name, num_nodes
):
    calls, server, _ = fronts
    batch = np.arange(num_nodes) // 4
    batch[-1] = 0
    arrays = {
        "x": np.ones((num_nodes, 8), np.float32),
        "edge_index": np.zeros((2, 2), np.int64),
        "batch": batch,
    }
    sent = pb.ModelInferRequest(model_name=name, id="one")
    for key, array in arrays.items():
        sent.inputs.add(name=key, datatype=WIRE[array.dtype.name], shape=array.shape)
        sent.raw_input_contents.append(array.tobytes())
    before = server._front._front.counts()["plain"]
    python, native = (outcome(call, sent.SerializeToString()) for call in calls)
    assert native == python
    assert native[0] is grpc.StatusCode.INVALID_ARGUMENT
    place, before_it = num_nodes - 1, num_nodes // 4 - 1
    assert f"input 'batch' [{place}] is 0 after {before_it}; it must ascend" in native[1]
    assert server._front._front.counts()["plain"] == before


@pytest.mark.parametrize("of_b", [[0, 0], [4, 1], [0, 5], [6, 0]])
def test_graphs_are_those_of_either_kind_of_things(fronts, of_b):
    calls, *_ = fronts
    arrays = {
        "x.a": np.ones((6, 2), np.float32),
        "batch.a": np.array([0, 1, 1, 2, 3, 3]),
        "x.b": np.full((2, 2), 10, np.float32),
        "batch.b": np.array(of_b),
    }
    sent = pb.ModelInferRequest(model_name="pooled", id="one")
    for key, array in arrays.items():
        sent.inputs.add(name=key, datatype=WIRE[array.dtype.name], shape=array.shape)
        sent.raw_input_contents.append(array.tobytes())
    python, native = (outcome(call, sent.SerializeToString()) for call in calls)
    assert native == python
    if max(of_b) >= 6:
        assert "[0, 6), the number of G" in python[1]
        return
    y = np.zeros((1 + max(3, *of_b), 2), np.float32)
    np.add.at(y, arrays["batch.a"], 1)
    np.add.at(y, of_b, 10)
    assert python[3]["y"] == ("float32", y.shape, y.tobytes())


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_is_answered_alike(fronts, name):
    _, native, python = fronts
    contents = []
    for number, size in enumerate((3, 500, 40)):
        one = message(name, counts_of(name, (size,) * 5), number)
        if number == 2:
            one.inputs[0].name = "other"
        one.id = str(number)
        contents.append(one.SerializeToString())
    staged = native._front._front.counts()["plain"]
    outputs, told = sent_on_a_stream(native, contents)
    expected_outputs, expected = sent_on_a_stream(python, contents)
    assert told == expected
    assert native._front._front.counts()["plain"] == staged + 2
    for request_id, found in outputs.items():  # which others it ran with may differ
        for output, wanted in expected_outputs[request_id].items():
            np.testing.assert_allclose(found[output], wanted, rtol=1e-3, atol=1e-3)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 4000), max_size=20), st.integers(0, 63), st.booleans())
def test_messages_in_frames_of_any_size(fronts, sizes, leave_out, narrow):
    calls, server, _ = fronts
    sent = message("kinds", (40, 70, 90), 1, narrow=narrow, leave_out=leave_out)
    content = sent.SerializeToString()
    expected = outcome(calls[0], content)
    framed = Framed(server.own_address)
    try:
        found = framed.outcome(content, sizes)
    finally:
        framed.close()
    assert found is not None
    assert found == {name: told[2] for name, told in expected[3].items()}
