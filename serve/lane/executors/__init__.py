"""Executors: ways to run a model, as PyG wrote it or faster, with the same answers.

    eager          PyG's own code
    csr            edges sorted once per run, layers over our kernels: `csr`, `convs`, `kernels`
    csr_…          `csr` with another variant of a GPU's kernels: `csr.NAMES`
    compiled       PyG's code, compiled ahead of time: `compiled`, `compiling`
    csr_compiled   the same over our kernels

An executor is a function from a ``LoadedModel`` to one that runs another way; it takes the module
over. `choose` decides, when a model is first seen, which one serves it: see there.
"""

from collections.abc import Callable
from functools import partial

from serve.lane.executors.compiled import with_package
from serve.lane.executors.csr import NAMES, with_csr
from serve.lane.executors.csr import CannotRun as CannotRun
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import PACKAGED, Signature

#: Executors that need nothing but the model.
EXECUTORS: dict[str, Callable[[LoadedModel], LoadedModel]] = {
    "eager": lambda loaded: loaded,
    "csr": with_csr,
}
#: Names of `csr` on a GPU when it uses other variants of the kernels.
VARIANTS = NAMES[1:]
_VARIANTS = {name: partial(with_csr, variant=NAMES.index(name)) for name in VARIANTS}


def runs_on_csr(executor: str) -> bool:
    """Return True for the names of `csr`, with whatever variant of the kernels."""
    return executor in NAMES


def with_executor(
    loaded: LoadedModel, name: str, signature: Signature | None = None, package: str = ""
) -> LoadedModel:
    """Return `loaded` run by the named executor; raises CannotRun with the reason.

    Compiled executors need the model's signature and the package made for it.
    """
    if name in PACKAGED:
        assert signature is not None
        if loaded.declared is not None:
            raise CannotRun("compiled executors take models with the short form of inputs")
        return with_package(loaded, signature, name, package)
    return (EXECUTORS | _VARIANTS)[name](loaded)
