"""Which executor serves a model: the fastest that agrees with PyG, by a short race.

Runs once per model, in the process that calibrates. The race is over sizes from 16 to 8,192 nodes,
alternating; the executor with the smaller geometric mean of times wins.
"""

import logging
import math
import time
from dataclasses import dataclass

from serve.models.executors import CannotRun, with_executor
from serve.models.executors.check import disagreement
from serve.models.facts import Signature
from serve.models.loader import LoadedModel, load_model
from serve.models.probes import Shape, probe_graph
from serve.models.tracing import trace

_log = logging.getLogger(__name__)

#: Nodes and edges raced over; each needs about eight times the memory of the one before.
_SIZES = ((16, 64), (128, 1_024), (1_024, 8_192), (8_192, 65_536))
_GROWTH = 8
_ROUNDS = 3
#: No size is raced at which PyG would take longer than this.
_LONG_RUN_NS = 250_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """The model on the executor that serves it, and why it is this one, for people.

    No reason is given where the configuration asked for it.
    """

    loaded: LoadedModel
    reason: str


def choose(eager: LoadedModel, signature: Signature, wanted: str, *, max_bytes: int) -> Choice:
    """The model on the executor `wanted`, or with `auto` on the fastest.

    An executor that cannot run the model or disagrees with PyG is never taken, whatever is
    wanted: then it is `eager`, and the reason says why. No raced graph takes more than
    `max_bytes`, as far as smaller ones tell.
    """
    if wanted == "eager":
        return Choice(eager, "")
    try:
        fast = with_executor(load_model(eager.spec), "csr")
    except CannotRun as error:
        return _fallback(eager, f"csr cannot run it: {error}")
    problem = disagreement(eager, fast, signature)
    if problem:
        return _fallback(eager, f"csr gives another answer: {problem}")
    if wanted == "csr":
        return Choice(fast, "")
    ratios = _race(eager, fast, signature, max_bytes)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    told = f"csr takes {min(ratios):.2f} to {max(ratios):.2f} of PyG's time"
    return Choice(fast, told) if mean < 1 else _fallback(eager, told)


def _fallback(eager: LoadedModel, reason: str) -> Choice:
    _log.warning("model %s: runs as PyG wrote it: %s", eager.spec.key, reason)
    return Choice(eager, reason)


def _race(
    eager: LoadedModel, fast: LoadedModel, signature: Signature, max_bytes: int
) -> list[float]:
    """Time of `fast` ÷ time of `eager` for every size, by the best of some rounds."""
    ratios = []
    for size in _SIZES:
        inputs = probe_graph(*size, Shape.PLAIN, eager.spec.inputs, signature)
        best = [math.inf, math.inf]
        for _ in range(_ROUNDS):
            for i, loaded in enumerate((eager, fast)):
                started = time.thread_time_ns()
                loaded.run(inputs)
                best[i] = min(best[i], max(1, time.thread_time_ns() - started))
        ratios.append(best[1] / best[0])
        peak_bytes = trace(lambda inputs=inputs: eager.run(inputs), eager.module, *size).peak_bytes  # type: ignore[misc]
        if _GROWTH * peak_bytes > max_bytes or _GROWTH * best[0] > _LONG_RUN_NS:
            break
    return ratios
