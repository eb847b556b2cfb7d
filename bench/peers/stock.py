"""Stock PyG behind the wire of every peer: a ``ModelInfer`` request in, its response out.

All peers get the same bytes as gnnserve. One thread, PyG as written, default allocator, as one
writes it to put PyG behind a general server.
"""

from typing import Any

import numpy as np
import torch

from bench.kit.result import ROOT
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.repository import find
from serve.wire.messages import decode_request, encode_response

REPOSITORY = ROOT / "configs" / "models"
MODELS = ("gcn", "sage", "gin", "gat")
_DTYPES: dict[str, Any] = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}


class StockModels:
    """The four demo models in this process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._models: dict[str, LoadedModel] = {
            name: load_model(find(REPOSITORY, name)) for name in MODELS
        }
        for model in self._models.values():
            model.run({"x": torch.zeros(4, 32), "edge_index": torch.zeros(2, 1, dtype=torch.long)})

    def answer(self, message: bytes) -> bytes:
        """Return the encoded answer of one request."""
        request = decode_request(message)
        inputs = {
            tensor.name: torch.from_numpy(
                np.frombuffer(data, _DTYPES[tensor.datatype]).reshape(tensor.shape).copy()
            )
            for tensor, data in zip(request.inputs, request.raws, strict=True)
        }
        inputs["edge_index"] = inputs["edge_index"].long()
        output = self._models[request.model].run(inputs).numpy()
        return encode_response(request.model, {"output": output})
