"""When two outputs of a model are the same, up to rounding."""

from torch import Tensor


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return True within 1e-4 of the expected tensor's scale."""
    if not expected.numel():
        return True
    scale = max(float(expected.double().abs().max()), 1e-12)
    return bool(((found.double() - expected.double()).abs() <= 1e-4 * scale).all())
