"""`gnnserve import` and `gnnserve init`: from files as users have them to a repository."""

import re
import sys
import textwrap
import tomllib

import msgspec
import pytest

from serve import cli
from serve.commands.import_model import (
    Imported,
    client_snippet,
    hub_source,
    mlflow_source,
    parse_arguments,
)
from serve.commands.init import starting_configuration
from serve.config import NO_KEYS, Config, load_config
from serve.errors import ConfigError
from serve.interface import InputSlot, Interface, TensorSlot
from serve.models.repository import ModelSpec, find
from tests.e2e.support import run_python
from tests.estimate.conftest import SIGNATURE

NET = textwrap.dedent(
    """
    import torch
    from torch_geometric.nn import GATv2Conv, global_add_pool

    print("a factory may print")


    class Pool(torch.nn.Module):
        def __init__(self, in_channels=6, hidden=4, edge_dim=3):
            super().__init__()
            self.conv = GATv2Conv(in_channels, hidden, edge_dim=edge_dim)

        def forward(self, x, edge_index, edge_attr, batch):
            return global_add_pool(self.conv(x, edge_index, edge_attr), batch)


    class Typed(Pool):
        def forward(self, z, edge_index):
            return self.conv(z[:, None].float().expand(-1, 6), edge_index)


    class Coder(Pool):
        def forward(self, data):
            raise AssertionError("it is not to be called")

        def encode(self, data, scale=1.0):
            out = self.conv(data.x, data.edge_index, data.edge_attr)
            return scale * global_add_pool(out, data.batch)


    class Sampled(Pool):
        def forward(self, x, adjs, batch):
            raise AssertionError("it is not to be called")


    class Odd(Pool):
        def forward(self, nodes, edges):
            return self.conv(nodes, edges)
    """
)
TRAIN = textwrap.dedent(
    """
    import os, sys, torch
    from net import Pool

    class Harmful:
        def __reduce__(self):
            return os.system, ("touch ran",)

    torch.save(Pool(hidden=5).state_dict(), "pool.pt")
    torch.save({"state_dict": Pool(hidden=5).state_dict(), "x": Harmful()}, "harmful.pt")
    graph = {"z": torch.tensor([1, 6, 8]), "edge_index": torch.tensor([[0, 1], [1, 2]])}
    torch.save(graph, "graph.pt")
    """
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a model's code and its weights."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "net.py").write_text(NET)
    (folder / "train.py").write_text(TRAIN)
    run_python(["train.py"], folder)
    return folder


def gnnserve(monkeypatch, folder, *arguments):
    """Run the command in `folder`; return its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["gnnserve", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.mark.slow
def test_a_model_is_imported_run_and_told_how_to_ask(trained, tmp_path, monkeypatch, capfd):
    repository = tmp_path / "models"
    command = (
        *("import", "--name", "pool", "--factory", "net.py:Pool", "--weights", "pool.pt"),
        *("--args", "hidden=5", "--repository", str(repository)),
    )
    assert gnnserve(monkeypatch, trained, *command) == 0
    told = capfd.readouterr()
    spec = find(repository, "pool")
    assert (spec.version, spec.factory, spec.args) == (1, "./net.py:Pool", {"hidden": 5})
    assert spec.inputs == ("x", "edge_index", "edge_attr", "batch")
    compile(told.out, "snippet", "exec")
    assert 'client.infer(\n        "pool",' in told.out
    assert "edge_attr=np.zeros((2, 3), np.float32)" in told.out
    # Once more: a new version of the same model; with other code it is refused.
    assert gnnserve(monkeypatch, trained, *command) == 0
    assert find(repository, "pool").version == 2
    capfd.readouterr()
    assert gnnserve(monkeypatch, trained, *command, "--args", "edge_dim=2") == 2
    assert "the model exists with another config.toml" in re.sub(
        r"\s+", " ", capfd.readouterr().err
    )
    assert sorted(path.name for path in repository.iterdir()) == ["pool"]


@pytest.mark.slow
def test_a_method_that_takes_a_data_is_imported(trained, tmp_path, monkeypatch, capfd):
    repository = tmp_path / "models"
    command = (
        *("import", "--name", "coder", "--factory", "net.py:Coder", "--weights", "pool.pt"),
        *("--args", "hidden=5", "--repository", str(repository), "--method", "encode"),
        *("--method-args", "scale=2.0"),
    )
    assert gnnserve(monkeypatch, trained, *command) == 2
    assert "encode of net.py:Coder takes a Data" in re.sub(r"\s+", " ", capfd.readouterr().err)
    command += "--inputs", "x,edge_index,edge_attr,batch"
    assert gnnserve(monkeypatch, trained, *command) == 0
    spec = find(repository, "coder")
    assert (spec.method, spec.method_args) == ("encode", {"scale": 2.0})


DECLARATION = """
[[model.input]]
name = "z"
dtype = "INT64"
shape = ["N"]
low = 1
high = 90

[[model.input]]
name = "edge_index"
dtype = "INT64"
shape = [2, "E"]
index = "N"

[[model.output]]
name = "y"
dtype = "FP32"
shape = ["N", 5]
"""


@pytest.mark.slow
def test_other_inputs_are_declared_in_a_file(trained, tmp_path, monkeypatch, capfd):
    repository, declaration = tmp_path / "models", tmp_path / "inputs.toml"
    declaration.write_text(DECLARATION)
    command = (
        *("import", "--name", "typed", "--factory", "net.py:Typed", "--weights", "pool.pt"),
        *("--args", "hidden=5", "--repository", str(repository)),
    )
    assert gnnserve(monkeypatch, trained, *command, "--declaration", str(declaration)) == 0
    told = capfd.readouterr().out
    assert '"z": np.full((3,), 1, np.int64)' in told
    compile(told, "snippet", "exec")
    interface = find(repository, "typed").interface
    assert [slot.name for slot in interface.inputs] == ["z", "edge_index"]
    declaration.write_text(DECLARATION + "[qos]\nfactor = 3.0\n")
    assert gnnserve(monkeypatch, trained, *command, "--declaration", str(declaration)) == 2
    assert "holds qos; a declaration is" in re.sub(r"\s+", " ", capfd.readouterr().err)


@pytest.mark.slow
def test_other_inputs_are_declared_by_an_example(trained, tmp_path, monkeypatch, capfd):
    repository = tmp_path / "models"
    command = (
        *("import", "--name", "typed", "--factory", "net.py:Typed", "--weights", "pool.pt"),
        *("--args", "hidden=5", "--repository", str(repository)),
    )
    assert gnnserve(monkeypatch, trained, *command) == 2
    assert "--example FILE" in capfd.readouterr().err
    assert gnnserve(monkeypatch, trained, *command, "--example", "graph.pt") == 0
    told = capfd.readouterr()
    compile(told.out, "snippet", "exec")
    assert "note: 'z' has values in [0, 9) in the example" in re.sub(r"\s+", " ", told.err)
    interface = find(repository, "typed").interface
    assert [slot.name for slot in interface.inputs] == ["z", "edge_index"]
    assert [slot.shape for slot in interface.outputs] == [("N", 5)]
    assert gnnserve(monkeypatch, trained, *command, "--example", "a", "--inputs", "x") == 2
    assert "--inputs and --example are both given" in re.sub(r"\s+", " ", capfd.readouterr().err)


def test_values_in_the_program_are_exact():
    slots = [
        InputSlot("t", "INT64", ("N",), low=1_234_567, high=2_000_000),
        InputSlot("p", "FP64", ("N",), low=0.1234567891, high=1.0),
        InputSlot("q", "FP32", ("N",), low=-5.0, high=5.0),
        InputSlot("mask", "BOOL", ("N",)),
    ]
    interface = Interface(tuple(slots), (TensorSlot("y", "FP32", ("N",)),))
    spec = ModelSpec(
        name="m", version=1, folder="", factory="", args={}, weights="", weights_bytes=0,
        inputs=(), interface=interface, qos_factor=None,
    )  # fmt: skip
    told = client_snippet(Imported(spec=spec, signature=SIGNATURE, tensors=0, notes=()))
    assert '"t": np.full((3,), 1234567, np.int64)' in told
    assert '"p": np.full((3,), 0.1234567891, np.float64)' in told
    assert '"q": np.full((3,), -5, np.float32)' in told
    assert '"mask": np.full((3,), 0, np.bool_)' in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--factory", "net.py:Pool", "--weights", "harmful.pt"), 2, "it holds 'posix.system'"),
        (("--factory", "net.py:Pool", "--weights", "pool.pt"), 1, "the model has torch.float32"),
        (("--factory", "net.py:None_", "--weights", "pool.pt"), 2, "has no callable 'None_'"),
        (
            ("--factory", "net.py:Odd", "--weights", "pool.pt", "--args", "hidden=5"),
            2,
            "forward are nodes, edges; say which of",
        ),
        (
            ("--factory", "net.py:Sampled", "--weights", "pool.pt", "--args", "hidden=5"),
            2,
            "class Served(Sampled): def forward(self, x, edge_index, batch): return super().",
        ),
    ],
)
def test_what_cannot_be_imported_leaves_nothing(
    trained, tmp_path, monkeypatch, capfd, options, code, told
):
    repository = tmp_path / "models"
    command = "import", "--name", "pool", "--repository", str(repository), *options
    assert gnnserve(monkeypatch, trained, *command) == code
    assert told in re.sub(r"\s+", " ", capfd.readouterr().err)
    assert list(repository.iterdir()) == []
    assert not (trained / "ran").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--factory", "net.py:Pool"), "by one of --weights, --hub and --mlflow"),
        (("--factory", "nowhere.py:Pool", "--weights", "w.pt"), "nowhere.py: no such file"),
        (("--factory", "net.py", "--weights", "w.pt"), "neither file.py:callable nor"),
        (("--factory", "a:b", "--weights", "w", "--args", "x"), "'x' is not key=value"),
        (("--factory", "a:b", "--weights", "w", "--method-args", "x"), "--method-args: 'x' is not"),
        (("--factory", "a:b", "--weights", "w", "--args", "d=1979-05-27"), "a value is a number"),
        (("--factory", "a:b", "--hub", "."), "holds no weights; looked for model.safetensors"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path, monkeypatch, capfd, options, told):
    command = "import", "--name", "m", "--repository", str(tmp_path / "models"), *options
    assert gnnserve(monkeypatch, tmp_path, *command) == 2
    assert told in re.sub(r"\s+", " ", capfd.readouterr().err)


def test_a_name_is_that_of_a_folder(tmp_path, monkeypatch, capfd):
    command = "import", "--name", "../m", "--factory", "a:b", "--weights", "w"
    assert gnnserve(monkeypatch, tmp_path, *command) == 2
    assert "--name: '../m'" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_toml_or_text():
    given = ["a=1", "b=0.5", "c=true", "d=[1, 2]", "e=mean", "f='x=y'", "g="]
    assert parse_arguments(given) == {
        "a": 1, "b": 0.5, "c": True, "d": [1, 2], "e": "mean", "f": "x=y", "g": "",
    }  # fmt: skip


def test_folders_of_others_are_known(tmp_path):
    (tmp_path / "model.pth").touch()
    (tmp_path / "config.json").write_text('{"hidden": 16, "nested": {"a": 1}}')
    assert hub_source(tmp_path) == (tmp_path / "model.pth", {"hidden": 16})
    (tmp_path / "model.safetensors").touch()
    assert hub_source(tmp_path)[0].name == "model.safetensors"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model.pth").touch()
    assert mlflow_source(tmp_path) == tmp_path / "data" / "model.pth"
    (tmp_path / "state_dict.pth").touch()
    assert mlflow_source(tmp_path) == tmp_path / "state_dict.pth"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        hub_source(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "files", "arguments"),
    [
        # PyGModelHubMixin.save_pretrained writes the plain arguments of the model beside it.
        ("--hub", {"model.pth": "pool.pt", "config.json": '{"in_channels": 6, "hidden": 5}'}, ()),
        ("--mlflow", {"state_dict.pth": "pool.pt", "MLmodel": "flavors: {}"}, ("hidden=5",)),
    ],
)
def test_folders_of_others_are_imported_and_run(
    trained, tmp_path, monkeypatch, capfd, option, files, arguments
):
    folder, repository = tmp_path / "saved", tmp_path / "models"
    folder.mkdir()
    for name, content in files.items():
        source = trained / content
        made = source.read_bytes() if source.is_file() else content.encode()
        (folder / name).write_bytes(made)
    given = [part for argument in arguments for part in ("--args", argument)]
    command = "import", "--name", "pool", "--factory", "net.py:Pool", option, str(folder), *given
    assert gnnserve(monkeypatch, trained, *command, "--repository", str(repository)) == 0
    compile(capfd.readouterr().out, "snippet", "exec")
    assert find(repository, "pool").args["hidden"] == 5


@pytest.mark.slow
def test_a_module_that_mlflow_pickled_is_refused_and_not_run(trained, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "saved"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "model.pth").write_bytes((trained / "harmful.pt").read_bytes())
    command = "import", "--name", "pool", "--factory", "net.py:Pool", "--mlflow", str(folder)
    repository = tmp_path / "models"
    assert gnnserve(monkeypatch, trained, *command, "--repository", str(repository)) == 2
    assert "it holds 'posix.system'" in re.sub(r"\s+", " ", capfd.readouterr().err)
    assert not (trained / "ran").exists()
    assert list(repository.iterdir()) == []


# -- init -----------------------------------------------------------------------------------------


def test_a_configuration_to_start_from_has_every_default(tmp_path, monkeypatch, capfd):
    assert gnnserve(monkeypatch, tmp_path, "init") == 0
    path = tmp_path / "gnnserve.toml"
    assert load_config(path) == msgspec.structs.replace(Config(), base=tmp_path, file=path)
    assert "gnnserve serve --config gnnserve.toml" in capfd.readouterr().out
    before = path.read_text()
    assert gnnserve(monkeypatch, tmp_path, "init") == 2
    assert path.read_text() == before
    assert gnnserve(monkeypatch, tmp_path, "init", "nowhere/x.toml") == 2


COMMENTED = [
    line[2:] for line in starting_configuration("x").splitlines() if re.match(r"# \w+ = ", line)
]


@pytest.mark.parametrize("line", COMMENTED)
def test_each_key_of_it_can_be_used(tmp_path, line):
    text = starting_configuration("x")
    if f"# {line}" in text.partition("# [[graph]]")[2]:
        text = text.replace("# [[graph]]", "[[graph]]").replace('# name = "', 'name = "')
        text = text.replace('# file = "', 'file = "')
    if re.match(r"(certificate|key|client_ca) = ", line):
        # They go together.
        text = text.replace("# certificate = ", "certificate = ").replace("# key = ", "key = ")
    if re.match(r"(listen|parts) = ", line):
        # A graph that is shared out needs all of them.
        for name in ("listen", "servers_file", "key_file"):
            text = text.replace(f"\n# {name} = ", f"\n{name} = ")
    path = tmp_path / "x.toml"
    path.write_text(text.replace(f"# {line}\n", f"{line}\n"))
    load_config(path)
    assert line.partition(" ")[0] in path.read_text()


def test_it_names_all_sections():
    table = tomllib.loads(starting_configuration("x"))
    sections = {field.name for field in msgspec.structs.fields(Config)} - NO_KEYS - {"graph"}
    assert set(table) == sections
    assert len(COMMENTED) > 30
