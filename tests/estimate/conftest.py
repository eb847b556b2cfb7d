import pytest

from serve.estimate.calibration import Calibration, Linear, MemoryFit, Ramp, TimeFit
from serve.models.model_signature import Signature

SIGNATURE = Signature(
    num_features=32,
    edge_dim=None,
    num_outputs=7,
    rows="node",
    accepts_empty=True,
    accepts_edgeless=True,
    deterministic=True,
)


@pytest.fixture
def calibration():
    """Inputs of 128 bytes a node and 16 an edge; 1 ms + 1 µs a node + 0.1 µs an edge."""
    return Calibration(
        model="m:1",
        executor="eager",
        device="cpu",
        threads=1,
        memory=MemoryFit(
            inputs=Linear((128, 16), 0),
            output=Linear((28, 0), 0),
            activations=(
                Linear((500, 260), 64, "convs.1 (SAGEConv): aten::div"),
                Linear((1024, 0), 0, "convs.2 (SAGEConv): aten::add"),
            ),
            held=(Linear((500, 292), 0), Linear((1000, 32), 0)),
        ),
        time=TimeFit(
            constant_ns=1e6,
            ramps=(
                Ramp((0.0,), (0.0,), (1_000.0,)),
                Ramp((0.0, 1_000.0), (0.0, 100_000.0), (100.0, 100.0)),
            ),
            high_ratio=1.2,
            error_median=0.04,
            error_p95=0.15,
            samples=30,
            largest=(10_000, 100_000),
        ),
    )
