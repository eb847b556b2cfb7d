import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serve.errors import ConfigError, UnknownName
from serve.models import weights_file
from serve.models.repository import BrokenModel, ModelSpec, content_hash, find, scan, version_order


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def weights(header, data=b"", announced=None):
    """A weights file with that header, as JSON or as bytes."""

    def change(folder):
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        prefix = struct.pack("<Q", len(raw) if announced is None else announced)
        (folder / "1" / "weights.safetensors").write_bytes(prefix + raw + data)

    return change


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def cut(size):
    """Keep `size` bytes of the weights; from the end when negative."""

    def change(folder):
        path = folder / "1" / "weights.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return change


CONFIG = '[model]\nfactory = "./model.py:Node"\n'
CORRUPTIONS = {
    "no config": (lambda f: (f / "config.toml").unlink(), ["config.toml", "cannot be read"]),
    "config is a folder": (
        lambda f: ((f / "config.toml").unlink(), (f / "config.toml").mkdir()),
        ["config.toml", "cannot be read"],
    ),
    "not TOML": (write("config.toml", "[model\n"), ["config.toml", "not valid TOML", "line 1"]),
    "not text": (
        lambda f: (f / "config.toml").write_bytes(b"\xff\xfe\x00"),
        ["config.toml", "not valid TOML"],
    ),
    "no model table": (write("config.toml", ""), ["config.toml", "`model`"]),
    "no factory": (write("config.toml", "[model]\n"), ["model", "`factory`"]),
    "unknown key": (
        write("config.toml", '[model]\nfactroy = "a:b"\n'),
        ["config.toml", "'model.factroy'", "did you mean 'model.factory'?"],
    ),
    "unknown table": (
        write("config.toml", CONFIG + "[qso]\nfactor = 2\n"),
        ["unknown key 'qso'", "did you mean 'qos'?"],
    ),
    "no method": (
        write("config.toml", CONFIG + "method = 'en code'\n"),
        ["model.method: 'en code' is no name of a method"],
    ),
    "wrong type": (
        write("config.toml", CONFIG + "num_features = 'many'\n"),
        ["model.num_features", "`int | null`", "`str`"],
    ),
    "factor below 1": (write("config.toml", CONFIG + "[qos]\nfactor = 0.5\n"), ["qos.factor"]),
    "unknown input": (
        write("config.toml", CONFIG + 'inputs = ["x", "edges"]\n'),
        ["model.inputs", "'edges'"],
    ),
    "no x": (write("config.toml", CONFIG + 'inputs = ["edge_index"]\n'), ["inputs", "'x'"]),
    "no inputs at all": (write("config.toml", CONFIG + "inputs = []\n"), ["inputs", "'x'"]),
    "an input twice": (write("config.toml", CONFIG + 'inputs = ["x", "x"]\n'), ["twice"]),
    "inputs in two places": (
        write("config.toml", 'inputs = ["x"]\n' + CONFIG + 'inputs = ["x"]\n'),
        ["inputs and model.inputs", "keep one"],
    ),
    "inputs swallowed by args": (
        write("config.toml", CONFIG + '[model.args]\na = 1\ninputs = ["x", "edge_index"]\n'),
        ["model.args.inputs", "above [model.args]"],
    ),
    "factory without callable": (
        write("config.toml", '[model]\nfactory = "serve.models.zoo"\n'),
        ["model.factory", "'serve.models.zoo'", "package.module:callable"],
    ),
    "factory outside the folder": (
        write("config.toml", '[model]\nfactory = "./../model.py:Node"\n'),
        ["model.factory", "in the model's folder"],
    ),
    "factory file missing": (
        write("config.toml", '[model]\nfactory = "./other.py:Node"\n'),
        ["model.factory", "other.py does not exist"],
    ),
    "no weights": (
        lambda f: (f / "1" / "weights.safetensors").unlink(),
        ["weights.safetensors", "cannot be read"],
    ),
    "no version": (
        lambda f: ((f / "1" / "weights.safetensors").unlink(), (f / "1").rmdir()),
        ["holds no version", "1/weights.safetensors"],
    ),
    "version not a number": (
        lambda f: (f / "1").rename(f / "v1"),
        ["mine/v1", "positive integer"],
    ),
    "version with a leading zero": (
        lambda f: (f / "1").rename(f / "01"),
        ["mine/01", "positive integer"],
    ),
    "empty weights": (cut(0), ["weights.safetensors", "truncated", "(0 bytes)"]),
    "header cut": (cut(40), ["truncated", "(40 bytes)"]),
    "data cut": (cut(-4), ["truncated", " bytes)"]),
    "pickle": (
        lambda f: (f / "1" / "weights.safetensors").write_bytes(b"\x80\x02}q\x00(X\x01\x00" * 9),
        ["not a safetensors file", "header of"],
    ),
    "header not JSON": (weights(b"{nonsense"), ["not a safetensors file"]),
    "header a list": (weights([1]), ["not a safetensors file"]),
    "entry without shape": (
        weights({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
        ["not a safetensors file"],
    ),
    "half precision": (
        weights(tensor("F16", (4,)), bytes(8)),
        ["tensor 'w' is F16", "must be F32"],
    ),
    "type that is not served": (
        weights(tensor("U16", (4,)), bytes(8)),
        ["tensor 'w' is U16", "must be F32"],
    ),
    "unknown type": (weights(tensor("F33"), bytes(8)), ["not a safetensors file"]),
    "shape and bytes differ": (
        weights(tensor(shape=(3,)), bytes(8)),
        ["not a safetensors file"],
    ),
    "a hole": (weights(tensor(offsets=(8, 16)), bytes(16)), ["not a safetensors file"]),
    "negative shape": (weights(tensor(shape=(-1, -2)), bytes(8)), ["not a safetensors file"]),
    "bytes left over": (weights(tensor(), bytes(12)), ["padded"]),
}


@pytest.mark.parametrize(("change", "told"), CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_corruption_is_named_and_harms_no_neighbour(put, change, told):
    folder = put()
    put("other")
    change(folder)
    root = folder.parent

    broken, fine = scan(root)

    assert isinstance(broken, BrokenModel)
    assert broken.name == "mine"
    assert [part for part in told if part not in broken.reason] == []
    assert str(folder) in broken.reason
    assert isinstance(fine, ModelSpec)
    with pytest.raises(ConfigError) as caught:
        find(root, "mine")
    assert str(caught.value) == broken.reason


def test_spec_says_what_the_config_says(put):
    folder = put(
        more='num_features = 9\ndescription = "d"\n[model.args]\nin_channels = 9\n[qos]\nfactor = 3'
    )
    (spec,) = scan(folder.parent)

    weights = folder / "1" / "weights.safetensors"
    assert spec == ModelSpec(
        name="mine",
        version=1,
        folder=str(folder),
        factory="./model.py:Node",
        args={"in_channels": 9},
        inputs=("x", "edge_index"),
        qos_factor=3.0,
        weights=str(weights),
        weights_bytes=weights.stat().st_size,
        num_features=9,
        description="d",
    )
    assert spec.key == "mine:1"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize("above", [True, False])
def test_inputs_may_stand_at_the_top_or_in_the_model_table(put, above):
    folder = put()
    line = 'inputs = ["edge_index", "x"]\n'
    (folder / "config.toml").write_text(line + CONFIG if above else CONFIG + line)
    assert find(folder.parent, "mine").inputs == ("edge_index", "x")


def test_versions_are_numbers_and_the_newest_is_the_default(put):
    for version in (2, 10, 1):
        folder = put(version=version)
    root = folder.parent
    assert [spec.version for spec in scan(root)] == [1, 2, 10]
    assert find(root, "mine").version == 10
    assert find(root, "mine", "2").version == 2
    for version in ("3", "v1", "01", "-1"):
        with pytest.raises(UnknownName, match=f"no version '{version}'; it has: 1, 2, 10"):
            find(root, "mine", version)


def test_a_broken_newest_version_is_an_error_not_a_silent_fallback(put):
    folder = put()
    (folder / "2").mkdir()
    assert [type(found) for found in scan(folder.parent)] == [ModelSpec, BrokenModel]
    with pytest.raises(ConfigError, match=r"2/weights\.safetensors"):
        find(folder.parent, "mine")
    assert find(folder.parent, "mine", "1").version == 1


def test_other_files_and_folders_are_the_users_own(put):
    folder = put()
    for path in (folder / "__pycache__", folder / "data", folder.parent / ".git"):
        path.mkdir()
    (folder.parent / "README.md").write_text("notes")
    assert [found.name for found in scan(folder.parent)] == ["mine"]


def test_an_unreadable_folder_harms_no_neighbour(put, monkeypatch):
    folder = put()
    put("other")
    listed = Path.iterdir

    def iterdir(path):
        if path == folder:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    broken, fine = scan(folder.parent)
    assert broken.reason == f"{folder}: cannot be read: Permission denied"
    assert fine.name == "other"


@pytest.mark.parametrize("name", ["nope", "../models/mine", "mine/1", "..", ""])
def test_unknown_name(put, name):
    root = put().parent
    with pytest.raises(UnknownName, match="the repository holds: mine"):
        find(root, name)


def test_unusable_name(put):
    (found,) = scan(put(name="my model").parent)
    assert "letters, digits" in found.reason


def test_no_repository(tmp_path):
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"models\.repository"):
            scan(path)
    assert scan(tmp_path) == ()


@pytest.mark.parametrize("name", ["config.toml", "model.py", "1/weights.safetensors"])
def test_content_hash_covers_config_code_and_weights(put, name):
    folder = put()
    spec = find(folder.parent, "mine")
    before = content_hash(spec)
    os.utime(folder / name, (1, 1))
    assert content_hash(spec) == before
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    assert content_hash(spec) != before


def test_content_hash_covers_the_source_of_an_installed_factory(put, monkeypatch, tmp_path):
    package = tmp_path / "site" / "some_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "net.py").write_text("a = 1")
    monkeypatch.syspath_prepend(tmp_path / "site")
    spec = find(put(factory="some_models.net:Net", weights_of="Node").parent, "mine")
    before = content_hash(spec)
    (package / "net.py").write_text("a = 2")
    assert content_hash(spec) != before


def test_reading_a_repository_needs_no_torch(put):
    root = put(factory="torch_geometric.nn.models:GCN", weights_of="Node").parent
    script = (
        "import sys; from pathlib import Path; from serve.models import community, repository;"
        f"[spec] = repository.scan(Path({str(root)!r})); repository.content_hash(spec);"
        "community.community_graph();"
        "sys.exit('torch' in sys.modules or 'torch_geometric' in sys.modules)"
    )
    folder = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], cwd=folder, check=False).returncode == 0


def test_weights_that_are_cut_while_they_are_checked_end_no_process(put, monkeypatch):
    folder = put()
    path = folder / "1" / "weights.safetensors"
    opened = weights_file.safe_open

    def cut_just_now(*args, **kwargs):
        path.write_bytes(b"")
        return opened(*args, **kwargs)

    monkeypatch.setattr(weights_file, "safe_open", cut_just_now)
    weights_file.check_weights(path)
    with pytest.raises(ConfigError, match=r"weights\.safetensors: truncated"):
        weights_file.check_weights(path)


def test_versions_are_sorted_as_numbers():
    names = ["10", "9", "", "2", "100", "1"]
    assert sorted(names, key=version_order) == ["", "1", "2", "9", "10", "100"]
