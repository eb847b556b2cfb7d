"""What the table of PyG's classes says holds, for some of them; every other class has a reason."""

import pytest
import torch_geometric.nn as pyg

from bench.kit.result import read_result
from bench.models.coverage import PACKAGES, row

ROWS = {found["name"]: found for found in read_result("coverage")["rows"]}


def test_every_class_is_there_with_its_inputs_or_a_sentence():
    assert len(ROWS) >= 44 + 67
    for found in ROWS.values():
        assert found["told"], found
        if not found["serves"]:
            assert found["told"].startswith("It"), found
            assert found["told"].endswith("."), found
            assert not found["told"].startswith("It fails"), found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["JumpingKnowledge", "HeteroJumpingKnowledge", "MetaLayer", "RENet", "VGAE", "TGNMemory",
     "MetaPath2Vec", "CorrectAndSmooth", "GPSE", "SAGEConv", "LPFormer", "WLConv"],
)  # fmt: skip
def test_the_result_is_what_is_found_now(name):
    package = PACKAGES[name in pyg.conv.__all__]
    assert row(package, name, 16) == ROWS[name]
