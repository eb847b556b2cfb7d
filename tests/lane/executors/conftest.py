import pytest
import torch

from bench.kit.architectures import wrap
from serve.lane.executors import with_executor
from serve.lane.executors.check import disagreement


@pytest.fixture
def twins():
    """A model as PyG runs it and on another executor, with the same weights, and its signature."""

    def build(make, inputs=("x", "edge_index"), features=12, executor="csr"):
        pair = []
        for _ in range(2):
            torch.manual_seed(5)
            pair.append(wrap(make(), "model", inputs, features))
        (eager, signature), (other, _) = pair
        return eager, with_executor(other, executor), signature

    return build


@pytest.fixture
def agree(twins):
    """Fails where the fused model differs from PyG's on any probe graph."""

    def check(make, **options):
        eager, other, signature = twins(make, **options)
        assert disagreement(eager, other, signature) == ""
        return eager, other, signature

    return check
