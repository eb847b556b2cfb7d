"""Ways to run a model: as PyG wrote it, or faster, with the same answers.

    eager   PyG's own code
    csr     edges sorted once per run, convolutions over our kernels    `csr`, `convs`, `kernels`

An executor is a function from a ``LoadedModel`` to one that runs another way; it takes the module
over. `choose` decides, when a model is first seen, which one serves it: see there.
"""

from collections.abc import Callable

from serve.models.executors.csr import CannotRun as CannotRun
from serve.models.executors.csr import with_csr
from serve.models.loader import LoadedModel

EXECUTORS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "eager": lambda loaded: loaded,
    "csr": with_csr,
}


def with_executor(loaded: LoadedModel, name: str) -> LoadedModel:
    """`loaded` run by the executor of that name; raises CannotRun saying why it cannot be."""
    return EXECUTORS[name](loaded)
