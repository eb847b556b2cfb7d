"""Our own client asks the models of the gallery with the objects that PyG's users have."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from bench.kit import gallery as entries
from bench.kit.gallery import BASIC, GALLERY
from bench.kit.waiting import PATIENCE_S
from serve.client import Client, InvalidRequest
from tests.gallery.test_gallery import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


@pytest.fixture(scope="module")
def client(server):
    with Client(server.target, timeout_s=PATIENCE_S) as found:
        yield found


def request(gallery, name, seed=5):
    loaded = gallery[1][name]
    arrays = entries.request(loaded, entries.interface(loaded).spread(30, 90), seed=seed)
    return arrays, entries.expected(loaded, arrays)


@pytest.mark.parametrize("name", [*GALLERY, *BASIC])
def test_mappings_of_arrays_are_answered(gallery, client, name):
    arrays, wanted = request(gallery, name)
    answer = client.infer(name, arrays)
    assert_close(answer.outputs, wanted)
    if gallery[1][name].spec.interface is not None:
        assert list(answer.outputs) == [one.name for one in client.interface(name).outputs]


def test_hetero_data_is_answered(gallery, client):
    arrays, wanted = request(gallery, "hgt")
    data = HeteroData()
    for name, array in arrays.items():
        attribute, _, of = name.partition(".")
        key = tuple(of.split("__")) if "__" in of else of
        data[key][attribute] = torch.from_numpy(array)
    assert_close(client.infer("hgt", data).outputs, wanted)
    with pytest.raises(InvalidRequest, match="takes a HeteroData, not a Data"):
        client.infer("hgt", Data(x=torch.ones(3, 8)))


def test_a_list_of_molecules_is_answered_molecule_by_molecule(gallery, client):
    arrays, _ = request(gallery, "molecules")
    names = [name for name in arrays if name != "batch"]
    data = Data(**{name: torch.from_numpy(arrays[name]) for name in names})
    alone = client.infer("molecules", data)
    parts = client.infer("molecules", [data, data, data]).split()
    assert len(parts) == 3
    for part in parts:
        assert part.output.shape == alone.output.shape
        np.testing.assert_allclose(part.output, alone.output, atol=1e-4, rtol=1e-4)
