"""The garbage collector's pauses."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Look for no garbage while open, nor later among what there is at the end.

    Imports leave little garbage, and each search goes through all objects that there are.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
