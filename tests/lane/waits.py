"""What would have the host wait for a device, counted on the processor."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: What copies a value from a device to the host, or would: its result has a size, or is a number,
#: that only values tell.
_WAITS = {
    _aten.item,
    _aten._local_scalar_dense,
    _aten.is_nonzero,
    _aten.equal,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
}
#: What reads or writes where a mask says: it looks up first where that is.
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class Counting(TorchDispatchMode):
    """Counts what waits for the device."""

    def __init__(self):
        super().__init__()
        self.waits = 0
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _waits(func.overloadpacket, args, kwargs or {}):
            self.waits += 1
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _waits(operator, args, kwargs):
    if operator in _INDEXED:
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if operator is _aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return operator in _WAITS
