"""Choose the executor that serves a model: the fastest that agrees with PyG, by a short race.

The race runs once per model, in the process that calibrates. Executors take turns on graphs of 16
to 8,192 nodes; the smallest geometric mean of times wins. Where `csr` serves on a GPU, its variants
race with it: the same kernels, which go over edges in other ways.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from serve.lane.executors import VARIANTS, CannotRun, with_executor
from serve.lane.executors.check import disagreement
from serve.lane.executors.compiling import TIMEOUT_S, compile_apart
from serve.lane.measure.probe_graphs import Shape, counts_for, inputs_for
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel, load_model
from serve.models.model_signature import PACKAGED, Signature
from serve.models.repository import ModelSpec

_log = logging.getLogger(__name__)

#: Nodes and edges of the race; each size needs about eight times the memory of the one before.
_SIZES = ((16, 64), (128, 1_024), (1_024, 8_192), (8_192, 65_536))
_GROWTH = 8
_ROUNDS = 3
#: The same of variants, whose kernels must take more than their launches to be told apart.
_VARIANT_SIZES = ((1_024, 8_192), (8_192, 65_536), (65_536, 524_288))
#: Shapes of graphs on which variants race: all nodes have few neighbours, one has all.
_VARIANT_SHAPES = (Shape.PLAIN, Shape.STAR)
#: A variant serves instead of `csr` if it takes at most this share of its time over all graphs, and
#: on those of each shape hardly more.
_GAIN, _HARDLY_MORE = 0.95, 1.02
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
    choice = _choose(eager, signature, options)
    if choice.loaded.executor == "csr" and options.site.name != "cpu":
        choice = _with_fastest_variant(choice, eager, signature, options)
    if options.wanted != "eager":
        _tell(choice, eager)
    return choice


def _choose(eager: LoadedModel, signature: Signature, options: ExecutorOptions) -> ExecutorChoice:
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
                return ExecutorChoice(found, "; ".join(problems))
        return ExecutorChoice(eager, "; ".join(problems))
    candidates = [found for found in [attempt("csr")] if found is not None]
    if options.package is not None:
        compiled = attempt("csr_compiled" if candidates else "compiled")
        candidates += [compiled] if compiled is not None else []
    if not candidates:
        return ExecutorChoice(eager, "; ".join(problems))
    ratios = _race([eager, *candidates], signature, options.max_bytes, options.site)
    told = [_in_words(one, ratio, "PyG") for one, ratio in zip(candidates, ratios, strict=True)]
    means = list(map(_mean, ratios))
    best, winner = min(zip(means, candidates, strict=True), key=lambda found: found[0])
    if best >= 1:
        winner = eager
    return ExecutorChoice(winner, "; ".join([*told, *problems]))


def _with_fastest_variant(
    choice: ExecutorChoice, eager: LoadedModel, signature: Signature, options: ExecutorOptions
) -> ExecutorChoice:
    """Return the choice of `csr`, or of its variant that beats it most.

    Only one of them is loaded at a time, beside those that `choose` has.
    """
    csr, told = choice.loaded, [choice.reason] if choice.reason else []
    best, winner = _GAIN, csr
    for name in VARIANTS:
        found = options.load(eager.spec, name)
        by_shape = [_race_twice(csr, found, signature, options, shape) for shape in _VARIANT_SHAPES]
        ratios = [ratio for of_shape in by_shape for ratio in of_shape]
        mean = _mean(ratios)
        if mean > best or any(_mean(of_shape) > _HARDLY_MORE for of_shape in by_shape):
            found.module.to_empty(device="meta")  # frees its weights
            continue
        words = _in_words(found, ratios, "csr")
        problem = disagreement(eager, found, signature, options.trial)
        if problem:
            told.append(f"{words}, but gives another answer: {problem}")
            continue
        told.append(words)
        best, winner = mean, found
    return ExecutorChoice(winner, "; ".join(told))


def _race_twice(
    csr: LoadedModel, variant: LoadedModel, signature: Signature, options: ExecutorOptions,
    shape: Shape,
) -> list[float]:  # fmt: skip
    """Return the variant's time ÷ that of `csr` for each size, by the race that it did worse in.

    Once it comes first and once second. A host that is busy slows down either now and then, and
    the first at each size pays for what is new to both.
    """
    second, first = (
        _race(pair, signature, options.max_bytes, options.site, _VARIANT_SIZES, shape)[0]
        for pair in ([csr, variant], [variant, csr])
    )
    # One of them may have ended at a smaller size.
    return [max(one, 1 / other) for one, other in zip(second, first, strict=False)]


def _mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _in_words(one: LoadedModel, ratios: Sequence[float], other: str) -> str:
    return f"{one.executor} takes {min(ratios):.2f} to {max(ratios):.2f} of {other}'s time"


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


def _tell(choice: ExecutorChoice, eager: LoadedModel) -> None:
    if choice.loaded is eager:
        _log.warning("model %s: runs as PyG wrote it: %s", eager.spec.key, choice.reason)
    elif choice.reason:
        _log.info("model %s: %s: %s", eager.spec.key, choice.loaded.executor, choice.reason)


def _race(
    contenders: Sequence[LoadedModel], signature: Signature, max_bytes: int, site: Site,
    sizes: Sequence[tuple[int, int]] = _SIZES, shape: Shape = Shape.PLAIN,
) -> list[list[float]]:  # fmt: skip
    """Return time ÷ the first contender's time for each other one and size, by the best round."""
    first = contenders[0]
    ratios: list[list[float]] = [[] for _ in contenders[1:]]
    for num_nodes, num_edges in sizes:
        size = counts_for(first.spec, num_nodes, num_edges)
        inputs = site.stage(inputs_for(first.spec, signature, size, shape))
        best = [math.inf] * len(contenders)
        for _ in range(_ROUNDS):
            for i, loaded in enumerate(contenders):
                run = partial(loaded.outputs, inputs)
                best[i] = min(best[i], max(1, site.time_ns(run)))
        for ratio, own in zip(ratios, best[1:], strict=True):
            ratio.append(own / best[0])
        run = partial(first.outputs, site.place(inputs))
        peak_bytes = site.trace(run, first.module, *size).peak_bytes
        if _GROWTH * peak_bytes > max_bytes or _GROWTH * best[0] > _LONG_RUN_NS:
            break
    return ratios
