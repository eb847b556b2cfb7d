"""Measuring a model takes no more memory than it may, whatever the model asks for."""

import pytest

from tests.metered import run_metered

LIMIT_BYTES = 64 << 20


@pytest.fixture(scope="module")
def found():
    """A model that pads each graph of a batch to the largest, measured below a limit."""
    return run_metered(f"""
        import json, torch
        from torch import nn
        from torch_geometric.utils import to_dense_batch
        from serve.estimate import ModelEstimator, Overhead
        from serve.estimate.graph_sizes import graph_sizes
        from serve.interface import InputSlot, Interface, TensorSlot
        from serve.lane.measure.allocator import Allocator, limited_by
        from serve.lane.measure.calibrate import calibrate
        from serve.lane.measure.probe_signature import probe_signature
        from serve.lane.models.declared import DeclaredForward
        from serve.lane.models.loader import LoadedModel
        from serve.models.repository import ModelSpec
        from serve.native import Meter

        class Padded(nn.Module):
            def forward(self, x, batch):
                dense, _ = to_dense_batch(x, batch)
                return (dense @ dense.transpose(1, 2)).softmax(dim=2).sum(dim=(1, 2))[:, None]

        torch.set_num_threads(1)
        meter = Meter.attach()
        asked = []

        def held_by(run):
            held = meter.held_by(run)
            asked.append(held)
            return held

        interface = Interface(
            (InputSlot("x", "FP32", ("N", 4)), InputSlot("batch", "INT64", ("N",), index=("G",))),
            (TensorSlot("y", "FP32", ("G", 1)),),
        )
        spec = ModelSpec(
            name="padded", version=1, folder="", factory="", args={{}}, weights="",
            weights_bytes=0, inputs=("x", "batch"), qos_factor=None, interface=interface,
        )
        module = Padded()
        loaded = LoadedModel(spec, module, declared=DeclaredForward(module, interface, "padded"))
        limited = limited_by(meter, {LIMIT_BYTES})
        calibration = calibrate(
            loaded, probe_signature(loaded), budget_s=0.2, max_bytes={LIMIT_BYTES},
            allocator=Allocator(held_by, limited=limited),
        )
        big = dict(x=torch.zeros(900, 4), batch=torch.arange(900).sub(450).clamp(min=0))
        estimator = ModelEstimator(calibration, Overhead())
        sizes = graph_sizes(spec.batches, big, (900,))
        estimate, _ = estimator.memory(900, *estimator.graphs.told(sizes))
        live = meter.live_bytes()
        try:
            limited(lambda: loaded.outputs(big))()
            told = ""
        except Exception as error:
            told = f"{{type(error).__name__}}: {{error}}"
        print(json.dumps({{
            "most": max(asked), "estimate": estimate, "told": told,
            "left": meter.live_bytes() - live,
        }}))
    """)


def test_no_run_takes_more_than_the_limit(found):
    assert 1 << 20 < found["most"] <= LIMIT_BYTES


def test_what_could_not_be_measured_is_estimated(found):
    scores_bytes = 4 * 450 * 451**2
    assert 2 * scores_bytes < found["estimate"] < 3 * scores_bytes


def test_a_run_that_was_ended_leaves_nothing(found):
    assert found["told"] == "TooLarge: it takes more than the 64 MiB that measuring may"
    assert found["left"] == 0


def test_a_warm_up_takes_no_more_than_it_may_and_goes_on():
    """Of a model that compares all pairs, such as one that looks for neighbours by distance."""
    found = run_metered("""
        import json, torch
        from torch import nn
        from bench.kit.architectures import NODE_INPUTS, wrap
        from serve.lane import warm_up
        from serve.native import Meter

        sizes, taken = [], []

        class AllPairs(nn.Module):
            def forward(self, x, edge_index):
                sizes.append(len(x))
                pairs = x[:, None] * x[None]
                taken.append(pairs.nbytes)
                return pairs.sum(1)

        meter = Meter.attach()
        loaded, signature = wrap(AllPairs(), "pairs", NODE_INPUTS, 64)
        sizes.clear(), taken.clear()
        warm_up.limited_warm_up(loaded, signature, meter)
        print(json.dumps([sizes, max(taken)]))
    """)
    assert found == [[16, 256, 2048, 16], 256 * 256 * 64 * 4]
