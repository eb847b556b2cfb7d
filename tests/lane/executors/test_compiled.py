"""What is asked before a model is compiled; one is compiled for real in tests/e2e."""

import pytest

from serve.lane.executors import CannotRun, compiling, with_executor
from serve.lane.executors.compiled import BENEATH
from serve.lane.executors.compiling import compile_apart
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.models.loader import load_model
from serve.models.model_signature import PACKAGED
from serve.models.repository import find
from serve.resources import configs_path


@pytest.fixture(scope="module")
def spec():
    return find(configs_path() / "models", "gat")


@pytest.fixture(scope="module")
def signature(spec):
    return probe_signature(load_model(spec))


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_export_sees_our_operators(model):
    """And nothing of PyG's scatter, so what is compiled is what `csr` runs."""
    spec = find(configs_path() / "models", model)
    signature = probe_signature(load_model(spec))
    loaded = BENEATH["csr_compiled"](load_model(spec))
    program = compiling._export(loaded, signature)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "gnnserve.csr.default" in called
    assert {"gnnserve.aggregate.default", "gnnserve.attend.default"} & called
    assert not any("scatter" in name or "index" in name for name in called)


def test_every_name_has_what_is_compiled():
    assert set(BENEATH) == PACKAGED


def test_without_a_compiler_the_reason_says_so(spec, signature, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotRun, match="there is no no-such-compiler"):
        compile_apart(spec, signature, "compiled", tmp_path / "package")


@pytest.mark.parametrize("files", [[], ["model/data/aotinductor/model/empty.wrapper.so"]])
def test_a_broken_package_cannot_run(spec, signature, tmp_path, files):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    with pytest.raises(CannotRun, match=r"does not load|not a compiled model"):
        with_executor(load_model(spec), "csr_compiled", signature, str(tmp_path))
