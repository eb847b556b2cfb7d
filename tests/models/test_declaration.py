"""`[[model.input]]` and `[[model.output]]`: what they mean, and what is wrong with broken ones."""

import json

import msgspec
import pytest
from safetensors.numpy import save_file

from serve.errors import ConfigError, InvalidInput
from serve.interface import Interface, interface_json
from serve.models.declaration import InputSection, OutputSection, interface_of
from serve.models.model_config import read_settings
from serve.models.repository import find

X = {"name": "x", "dtype": "FP32", "shape": ["N", 4]}
EDGES = {"name": "edge_index", "dtype": "INT64", "shape": [2, "E"], "index": "N"}
BATCH = {"name": "batch", "dtype": "INT64", "shape": ["N"], "index": "G", "default": 0}
OUT = {"name": "y", "dtype": "FP32", "shape": ["N", 3]}


def toml(kind, table):
    return "\n".join(
        [f"[[model.{kind}]]", *(f"{key} = {json.dumps(one)}" for key, one in table.items())]
    )


@pytest.fixture
def read(tmp_path):
    def read_tables(inputs, outputs, more=""):
        folder = tmp_path / "m"
        folder.mkdir(exist_ok=True)
        tables = [toml("input", table) for table in inputs]
        tables += [toml("output", table) for table in outputs]
        text = "\n\n".join(['[model]\nfactory = "torch.nn:Linear"\n' + more, *tables])
        (folder / "config.toml").write_text(text)
        return read_settings(folder)

    return read_tables


def test_a_declaration_is_read_whole(read, tmp_path):
    read([X, EDGES, BATCH], [OUT, {"name": "z", "dtype": "FP32", "shape": ["G", 1]}])
    found = tmp_path / "m" / "1"
    found.mkdir()
    save_file({}, found / "weights.safetensors")
    spec = find(tmp_path, "m")
    interface = spec.interface
    assert spec.inputs == ("x", "edge_index", "batch")
    assert interface.counts == ("N", "E")
    assert interface.nodes == ("N",)
    assert list(interface.graphs) == ["G"]
    # It goes to lanes by message, and to clients as JSON.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec)) == spec
    assert msgspec.json.decode(interface_json(interface), type=Interface) == interface


ATOMS = {"name": "atoms", "dtype": "INT64", "shape": ["N", 3], "high": [119, 5, 12]}


def test_integers_of_each_column_may_have_a_range_of_their_own(read):
    read([ATOMS, EDGES, ATOMS | {"name": "more", "low": [1, -2, 0], "high": 7}], [OUT])


@pytest.mark.parametrize(
    ("table", "bounds", "columns"),
    [
        (ATOMS, (0, 119), ((0, 119), (0, 5), (0, 12))),
        (ATOMS | {"low": [1, -2, 0], "high": 7}, (-2, 7), ((1, 7), (-2, 7), (0, 7))),
        (ATOMS | {"high": 7}, (0, 7), ()),
    ],
)
def test_ranges_of_columns_are_within_that_of_all(table, bounds, columns):
    one = msgspec.convert(table, InputSection)
    (slot,) = interface_of([one], [msgspec.convert(OUT, OutputSection)], "m").inputs
    assert (slot.bounds, slot.columns) == (bounds, columns)


def less(table, *keys):
    return {key: value for key, value in table.items() if key not in keys}


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        ([X | {"dtype": "FLOAT"}], [OUT], r"model\.input 'x': dtype: unknown 'FLOAT'; known: FP32"),
        ([X, X], [OUT], r"model\.input 'x': the name is given twice"),
        ([ATOMS | {"high": [9, 5]}], [OUT], "high: 2 numbers for 3 columns; give one, or one for"),
        ([ATOMS | {"shape": ["N"]}], [OUT], "high: 3 numbers for no columns"),
        ([ATOMS | {"shape": [3, "N"]}], [OUT], "high: 3 numbers for no columns"),
        ([ATOMS | {"high": [9, 0, 5]}], [OUT], "'atoms': column 1: low 0 is not below high 0"),
        ([ATOMS | {"high": []}], [OUT], "high: 0 numbers for 3 columns"),
        ([ATOMS | {"default": 9}], [OUT], r"default 9 is outside \[0, 5\)"),
        ([X | {"high": [1, 2, 3, 4]}], [OUT], "high: only integers have a range for each column"),
        ([X, less(EDGES, "index")], [OUT], "'edge_index': its values are unknown: give index"),
        ([X, EDGES | {"index": "M"}], [OUT], "no input's shape binds 'M', and only a vector"),
        ([X, EDGES | {"index": ["N", "M"]}], [OUT], "index: no input's shape binds 'M'"),
        ([X, EDGES | {"index": ["N", "N", "N"]}], [OUT], "3 symbols for 2 rows"),
        ([X, EDGES | {"dtype": "FP32"}], [OUT], "only INT64 and INT32 can point to things"),
        ([X, EDGES | {"low": 0}], [OUT], "low and high: an index has its range from"),
        ([X], [OUT | {"shape": ["M"]}], r"model\.output 'y': no input binds the symbol 'M'"),
        ([X], [], r"model\.output: none is declared"),
        ([], [OUT], r"model\.input: none is declared"),
        ([X | {"shape": ["N", "N"]}], [OUT], r"shape: \[N, N\] has 2 symbols; one is taken"),
        ([X | {"shape": ["N", 0]}], [OUT], "shape: 0 is not at least 1"),
        ([X | {"shape": ["N 1"]}], [OUT], "'N 1' is no symbol"),
        ([X | {"shape": [4]}], [OUT | {"shape": [4]}], "no shape has a symbol"),
        ([X, BATCH | {"shape": ["M"], "optional": True}], [OUT], "'M' is only in inputs that"),
        ([X | {"low": 2, "high": 1}], [OUT], "low 2 is not below high 1"),
        (
            [{"name": "z", "dtype": "INT64", "shape": ["N"], "high": 3, "default": 5}],
            [OUT],
            r"default 5 is outside \[0, 3\)",
        ),
        ([X | {"name": "node_ids"}], [OUT], "belongs to requests by node id"),
        ([X | {"name": "x y"}], [OUT], "a name is letters"),
        ([X | {"name": f"x{i}"} for i in range(17)], [OUT], "17 are declared, at most 16"),
        ([X | {"dtpye": "FP32"}], [OUT], r"unknown key 'model\.input\[0\]\.dtpye'; did you mean"),
        ([less(X, "dtype")], [OUT], "dtype"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_exactly(read, inputs, outputs, told):
    with pytest.raises(ConfigError, match=told) as caught:
        read(inputs, outputs)
    assert "config.toml" in str(caught.value)


def test_all_faults_are_told_at_once(read):
    with pytest.raises(ConfigError) as caught:
        read([X | {"dtype": "?"}, X], [OUT | {"shape": ["M"]}])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('inputs = ["x"]', "inputs and model.input are both given"),
        ("num_features = 3", "model.num_features: model.input tells all shapes"),
    ],
)
def test_the_short_form_and_a_declaration_exclude_each_other(read, more, told):
    with pytest.raises(ConfigError, match=told):
        read([X, EDGES], [OUT], more)


def test_counts_of_several_kinds(read):
    config = read(
        [
            {"name": "x.a", "dtype": "FP32", "shape": ["N.a", 4]},
            {"name": "edge_index.a__to__b", "dtype": "INT64", "shape": [2, "E"],
             "index": ["N.a", "N.b"]},
            {"name": "x.b", "dtype": "FP16", "shape": ["N.b", 2]},
        ],
        [{"name": "b", "dtype": "FP32", "shape": ["N.b", 3]}],
    )  # fmt: skip
    interface = interface_of(config.model.input, config.model.output, "here")
    assert interface.counts == ("N.a", "N.b", "E")
    assert interface.spread(5, 9) == (3, 2, 9)
    assert interface.totals((3, 2, 9)) == (5, 9)
    assert not interface.is_simple
    per, fixed = interface.bytes_per(interface.inputs)
    assert per == (16.0, 4.0, 16.0)
    assert fixed == 0
    shapes = {"x.a": (3, 4), "edge_index.a__to__b": (2, 9), "x.b": (2, 2)}
    assert interface.counts_of(shapes) == (3, 2, 9)


def test_inputs_that_disagree_are_refused_by_name(read):
    config = read([X, EDGES, BATCH], [OUT])
    interface = interface_of(config.model.input, config.model.output, "here")
    with pytest.raises(InvalidInput, match="'batch': 4 N, but 'x' has 3 N"):
        interface.counts_of({"x": (3, 4), "edge_index": (2, 5), "batch": (4,)})
