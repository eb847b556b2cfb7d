"""Conversion of arrays and tensors to what is sent.

Arrays may be numpy arrays, torch tensors (on any device, of any precision) or nested sequences.
`edge_index` is sent as INT32 when its values fit, which those of all real graphs do. Narrowing
80,000 edges takes 0.05 ms and halves what is usually the largest tensor, which saves several times
as much on the way.
"""

from typing import Any

import numpy as np

from serve.client.errors import InvalidRequest
from serve.inputs import INPUTS
from serve.wire.messages import DATATYPES, Array

_INT32 = np.iinfo(np.int32)
#: Inputs that may be sent as INT32 instead.
_NARROWED = frozenset(name for name, each in INPUTS.items() if each.also == "INT32")


def array_for(name: str, value: Any, datatype: str, *, narrow: bool | None = None) -> Array:
    """Convert `value`, the tensor `name`, to the protocol's `datatype`; raises InvalidRequest.

    With `narrow`, integers become INT32 if all of them fit; None for what the input allows.
    """
    narrow = name in _NARROWED if narrow is None else narrow
    kind = DATATYPES.get(datatype)
    if kind is None or kind.dtype is None:
        raise InvalidRequest.local(f"tensor '{name}': {datatype} cannot be sent from Python")
    array = _as_numpy(name, value)
    if array.dtype.kind not in "biuf":
        raise InvalidRequest.local(f"tensor '{name}': {array.dtype} is no number that can be sent")
    if kind.dtype.kind == "f":
        return array.astype(kind.dtype, copy=False)
    if array.size == 0:
        return array.astype(np.int32 if narrow else kind.dtype)
    if array.dtype.kind == "f":
        raise InvalidRequest.local(f"tensor '{name}': integers are required, not {array.dtype}")
    if kind.dtype.kind == "b":
        return _as_bool(name, array)
    if narrow and _fits(array, _INT32):
        return array.astype(np.int32, copy=False)
    if not _fits(array, np.iinfo(kind.dtype)):
        raise InvalidRequest.local(
            f"tensor '{name}': {array.min()} to {array.max()} does not fit {datatype}"
        )
    return array.astype(kind.dtype, copy=False)


def any_array(name: str, value: Any) -> Array:
    """Convert `value`, the tensor `name`, to an array of its own dtype; raises InvalidRequest."""
    array = _as_numpy(name, value)
    if array.dtype.kind not in "biuf":
        raise InvalidRequest.local(f"tensor '{name}': {array.dtype} is no number that can be sent")
    return array


def is_integer(value: Any) -> bool:
    """Return True for an array or tensor of integers; False for any other object, and lists."""
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):
        return bool(dtype.kind in "iu")
    # One of torch, told apart without importing it.
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def _as_numpy(name: str, value: Any) -> Array:
    """Return `value` as a numpy array of any dtype."""
    try:
        if hasattr(value, "detach"):
            value = _dense(value.detach()).cpu().numpy()
        elif hasattr(value, "tocoo") or hasattr(value, "coo"):
            raise TypeError("it is sparse; send it dense")
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise InvalidRequest.local(f"tensor '{name}': {error}") from error


def _dense(tensor: Any) -> Any:
    """Return a torch tensor in a form that numpy knows; raises TypeError for a sparse one."""
    if str(tensor.layout) != "torch.strided":
        raise TypeError(f"it is sparse ({tensor.layout}); send x.to_dense()")
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float()
    return tensor


def _as_bool(name: str, array: Array) -> Array:
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        raise InvalidRequest.local(f"tensor '{name}': booleans are required, not {array.dtype}")
    return array.astype(np.bool_, copy=False)


def _fits(array: Array, limits: Any) -> bool:
    if array.dtype.kind == "b" or np.can_cast(array.dtype, limits.dtype):
        return True
    return bool(array.min() >= limits.min and array.max() <= limits.max)
