"""The models of the gallery over HTTP: Triton's client, and curl as the pages show it."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from bench.kit import gallery as entries
from bench.kit.gallery import BASIC, GALLERY
from bench.kit.waiting import PATIENCE_S
from serve.rest.process import missing_packages
from tests.gallery.test_gallery import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.skipif(bool(missing_packages()), reason="the gateway's packages"),
]


def request(gallery, name):
    """Return arrays for every input of a model, and what PyG answers."""
    loaded = gallery[1][name]
    arrays = entries.request(loaded, entries.interface(loaded).spread(30, 90), seed=7)
    return arrays, entries.expected(loaded, arrays)


@pytest.fixture(scope="module")
def client(server):
    triton = pytest.importorskip("tritonclient.http")
    limits = {"network_timeout": PATIENCE_S, "connection_timeout": PATIENCE_S}
    with triton.InferenceServerClient(f"127.0.0.1:{server.http_port}", **limits) as found:
        yield found


@pytest.mark.parametrize("name", GALLERY)
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_tritons_client_gets_what_pyg_answers(gallery, client, name, binary):
    triton = pytest.importorskip("tritonclient.http")
    arrays, wanted = request(gallery, name)
    inputs = []
    for one in client.get_model_metadata(name)["inputs"]:
        array = arrays[one["name"]]
        inputs.append(triton.InferInput(one["name"], list(array.shape), one["datatype"]))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    outputs = [triton.InferRequestedOutput(key, binary_data=binary) for key in wanted]
    answer = client.infer(name, inputs, outputs=outputs)
    assert_close({key: answer.as_numpy(key) for key in wanted}, wanted)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("name", [*GALLERY, *BASIC])
def test_curl_gets_what_pyg_answers(gallery, server, name):
    arrays, wanted = request(gallery, name)
    interface = entries.interface(gallery[1][name])
    body = {
        "inputs": [
            {
                "name": slot.name,
                "datatype": slot.datatype,
                "shape": arrays[slot.name].shape,
                "data": arrays[slot.name].tolist(),
            }
            for slot in interface.inputs
        ]
    }
    done = subprocess.run(
        ["curl", "-sS", f"http://127.0.0.1:{server.http_port}/v2/models/{name}/infer", "-d", "@-"],
        input=json.dumps(body),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert "outputs" in answer, answer
    dtypes = {slot.name: slot.dtype for slot in interface.outputs}
    assert_close(
        {
            one["name"]: np.array(one["data"], dtypes[one["name"]]).reshape(one["shape"])
            for one in answer["outputs"]
        },
        wanted,
    )
