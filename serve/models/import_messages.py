"""What `gnnserve import` asks of the process that reads a trained model, and what that tells."""

import msgspec

from serve.models.repository import ModelSpec


class ReadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Weights to read, and where to write them."""

    #: Weights as trained, and where to write them as safetensors.
    source: str
    target: str
    #: Removed from the beginning of every name; empty for none.
    strip: str = ""
    #: How the model will be built, to ask its forward for its parameters; None not to.
    spec: ModelSpec | None = None
    #: A graph of PyG to declare the inputs by; empty for none.
    example: str = ""


class ReadModel(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    tensors: int = 0
    #: What was changed, in sentences.
    notes: tuple[str, ...] = ()
    #: Parameters that forward requires, in its order.
    forward: tuple[str, ...] = ()
    #: `[[model.input]]` and `[[model.output]]` as the example has them; empty without one.
    declaration: str = ""
    #: Why nothing was written; empty when it was.
    error: str = ""
