"""Choose the executor that serves a model: the fastest that agrees with PyG, by a short race.

The race runs once per model, in the process that calibrates. Executors take turns on graphs of 16
to 8,192 nodes; the smallest geometric mean of times wins.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from serve.lane.executors import CannotRun, with_executor
from serve.lane.executors.check import disagreement
from serve.lane.executors.compiling import TIMEOUT_S, compile_apart
from serve.lane.measure.probe_graphs import counts_for, inputs_for
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.model_signature import PACKAGED, Signature
from serve.models.repository import ModelSpec

_log = logging.getLogger(__name__)

#: Nodes and edges of the race; each size needs about eight times the memory of the one before.
_SIZES = ((16, 64), (128, 1_024), (1_024, 8_192), (8_192, 65_536))
_GROWTH = 8
_ROUNDS = 3
#: Upper bound of PyG's time for a size of the race.
_LONG_RUN_NS = 250_000_000

#: Executors to try, in order, for each one that the configuration may ask for.
_INSTEAD = {
    "csr": ("csr",),
    "compiled": ("compiled",),
    "csr_compiled": ("csr_compiled", "csr"),
}


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    """The model on the executor that serves it, and the reason for people.

    The reason is empty when the configuration asked for this executor.
    """

    loaded: LoadedModel
    reason: str


def _on_processor(spec: ModelSpec, name: str) -> LoadedModel:
    return with_executor(load_model(spec), name)


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Limits of the choice, and where it is made."""

    #: An executor's name, or `auto` for the fastest.
    wanted: str = "auto"
    #: Upper bound of a raced graph's memory, extrapolated from smaller graphs.
    max_bytes: int = 1 << 30
    #: Folder for compiled models; with None, `auto` compiles nothing.
    package: Path | None = None
    compile_timeout_s: float = TIMEOUT_S
    #: Called when the compiler starts, which takes seconds.
    compiling: Callable[[], None] = lambda: None
    #: Where the race takes place.
    site: Site = field(default_factory=Processor)
    #: The model where a bad input is only an error; None when the race takes place there.
    trial: LoadedModel | None = None
    #: Loads a model at `site` on an executor that needs no package.
    load: Callable[[ModelSpec, str], LoadedModel] = _on_processor


def choose(eager: LoadedModel, signature: Signature, options: ExecutorOptions) -> ExecutorChoice:
    """Return the model on the wanted executor, or with `auto` on the fastest.

    An executor that cannot run the model or disagrees with PyG is never chosen. The next one that
    can run it takes its place, in the end `eager`, and the reason says why.
    """
    if options.wanted == "eager":
        return ExecutorChoice(eager, "")
    problems: list[str] = []

    def attempt(name: str) -> LoadedModel | None:
        try:
            found = _made(eager, signature, name, options)
        except CannotRun as error:
            problems.append(f"{name} cannot run it: {error}")
            return None
        problem = disagreement(eager, found, signature, options.trial)
        if problem:
            problems.append(f"{name} gives another answer: {problem}")
        return None if problem else found

    if options.wanted != "auto":
        for name in _INSTEAD[options.wanted]:
            found = attempt(name)
            if found is not None:
                return _told(ExecutorChoice(found, "; ".join(problems)), eager)
        return _told(ExecutorChoice(eager, "; ".join(problems)), eager)
    candidates = [found for found in [attempt("csr")] if found is not None]
    if options.package is not None:
        compiled = attempt("csr_compiled" if candidates else "compiled")
        candidates += [compiled] if compiled is not None else []
    if not candidates:
        return _told(ExecutorChoice(eager, "; ".join(problems)), eager)
    ratios = _race([eager, *candidates], signature, options.max_bytes, options.site)
    told = [
        f"{one.executor} takes {min(ratio):.2f} to {max(ratio):.2f} of PyG's time"
        for one, ratio in zip(candidates, ratios, strict=True)
    ]
    means = [math.exp(sum(map(math.log, ratio)) / len(ratio)) for ratio in ratios]
    best, winner = min(zip(means, candidates, strict=True), key=lambda found: found[0])
    if best >= 1:
        winner = eager
    return _told(ExecutorChoice(winner, "; ".join([*told, *problems])), eager)


def _made(
    eager: LoadedModel, signature: Signature, name: str, options: ExecutorOptions
) -> LoadedModel:
    """Load the model anew on that executor, compiling it first where it has to be."""
    if name not in PACKAGED:
        return options.load(eager.spec, name)
    if options.package is None:
        raise CannotRun("there is no folder to compile into")
    options.compiling()
    compile_apart(eager.spec, signature, name, options.package, options.compile_timeout_s)
    return with_executor(load_model(eager.spec), name, signature, str(options.package))


def _told(choice: ExecutorChoice, eager: LoadedModel) -> ExecutorChoice:
    if choice.loaded is eager:
        _log.warning("model %s: runs as PyG wrote it: %s", eager.spec.key, choice.reason)
    elif choice.reason:
        _log.info("model %s: %s: %s", eager.spec.key, choice.loaded.executor, choice.reason)
    return choice


def _race(
    contenders: Sequence[LoadedModel], signature: Signature, max_bytes: int, site: Site
) -> list[list[float]]:
    """Return time ÷ the first contender's time for each other one and size, by the best round."""
    eager = contenders[0]
    ratios: list[list[float]] = [[] for _ in contenders[1:]]
    for num_nodes, num_edges in _SIZES:
        size = counts_for(eager.spec, num_nodes, num_edges)
        inputs = site.stage(inputs_for(eager.spec, signature, size))
        best = [math.inf] * len(contenders)
        for _ in range(_ROUNDS):
            for i, loaded in enumerate(contenders):
                run = partial(loaded.outputs, inputs)
                best[i] = min(best[i], max(1, site.time_ns(run)))
        for ratio, own in zip(ratios, best[1:], strict=True):
            ratio.append(own / best[0])
        run = partial(eager.outputs, site.place(inputs))
        peak_bytes = site.trace(run, eager.module, *size).peak_bytes
        if _GROWTH * peak_bytes > max_bytes or _GROWTH * best[0] > _LONG_RUN_NS:
            break
    return ratios
