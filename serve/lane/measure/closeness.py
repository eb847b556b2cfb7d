"""When two outputs of a model are the same, up to rounding."""

import torch
from torch import Tensor

#: Upper bound of a difference, relative to the largest finite value.
TOLERANCE = 1e-4


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return True for one shape and values within ``TOLERANCE`` of the scale of `expected`.

    Infinities and NaN are in the same places: in some models, nodes without edges give them.
    """
    if found.shape != expected.shape:
        return False
    wanted = expected.double()
    finite = wanted[wanted.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-12)
    return torch.allclose(found.double(), wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
