"""One table says what a request's inputs are; nobody else spells them out."""

import re
from dataclasses import fields
from typing import get_args, get_type_hints

import numpy as np
import pytest

from bench.kit.result import ROOT
from serve.client.requests import Request, RequestFields
from serve.inputs import COUNTED_BY, INPUTS, InputName

#: Keyword arguments and docstrings of the client, and layers that have such arguments themselves.
SPELL_THEM = ("serve/client/", "serve/lane/executors/", "serve/models/zoo.py", "serve/inputs.py")


def test_the_type_for_configurations_has_every_name():
    assert get_args(InputName) == tuple(INPUTS)


def test_the_client_takes_every_input_by_keyword():
    assert INPUTS.keys() <= {field.name for field in fields(Request)}
    assert INPUTS.keys() <= get_type_hints(RequestFields).keys()


def test_nobody_else_spells_the_names_of_optional_inputs():
    found = []
    for path in [*(ROOT / "serve").rglob("*.py"), *(ROOT / "loadgen").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        if name.startswith(SPELL_THEM) or "/pb/" in name:
            continue
        code = re.sub(r'""".*?"""|#[^\n]*', "", path.read_text(encoding="utf-8"), flags=re.S)
        found += [name] if re.search(r'["\'](edge_weight|edge_attr)["\']', code) else []
    assert found == []


@pytest.mark.parametrize("name", INPUTS)
def test_bytes_each_are_those_of_an_array_of_that_shape(name):
    each = INPUTS[name]
    counts = {"N": 7, "E": 11, "G": 3, "F": 5, "D": 2}
    array = np.zeros(each.shape_of(counts), each.dtype)
    assert array.nbytes == each.bytes_each(counts) * counts[each.per[0]]


def test_sizes_that_are_not_known_are_minus_one():
    assert INPUTS["x"].shape_of({"F": 9}) == (-1, 9)
    assert INPUTS["edge_index"].shape_of({}) == (2, -1)


def test_nodes_and_edges_are_counted_by_inputs_every_model_takes():
    for symbol, (name, axis) in COUNTED_BY.items():
        assert INPUTS[name].always
        assert INPUTS[name].per == (symbol, axis)
