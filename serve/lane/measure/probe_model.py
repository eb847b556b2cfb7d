"""Measure a new model: find its signature, choose its executor and calibrate it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from serve.ipc.messages import FromLane, ModelProbed, ProbeModel, Progress
from serve.lane import clock
from serve.lane.executors import runs_on_csr
from serve.lane.executors.check import takes_narrow_edges
from serve.lane.executors.choose import ExecutorOptions, choose
from serve.lane.measure.allocator import Allocator, limited_by
from serve.lane.measure.calibrate import calibrate
from serve.lane.measure.probe_signature import probe_signature
from serve.lane.measure.where_measured import Site
from serve.lane.models.loader import LoadedModel
from serve.lane.place import Place
from serve.lane.shared_state import SharedState
from serve.lane.warm_up import warm_up
from serve.models.repository import ModelSpec
from serve.native import Meter


def probe_model(message: ProbeModel, place: Place, tell: Callable[[FromLane], None]) -> ModelProbed:
    """Measure the model of `message` at `place`, telling progress. Raises whatever is wrong."""
    message = place.limited(message)
    # Lanes run the model with these, whatever loading it changes.
    shared = SharedState.of_torch()

    def load(spec: ModelSpec, executor: str) -> tuple[LoadedModel, Site]:
        loaded = place.load_to_measure(spec, executor)
        shared.restore()
        return loaded

    began_ns = clock.now_ns()
    model, site = load(message.spec, "eager")
    load_ns = clock.now_ns() - began_ns
    trial = place.load_to_try(message.spec)
    shared.restore()
    signature = probe_signature(trial or model)
    if message.tries_only:
        return ModelProbed(signature, b"")
    options = ExecutorOptions(
        message.executor,
        message.max_bytes,
        Path(message.package) if message.package else None,
        message.compile_timeout_s,
        lambda: tell(Progress("compile", 0.0)),
        site,
        trial,
        lambda spec, executor: load(spec, executor)[0],
    )
    chosen = choose(model, signature, options)
    allocator = _allocator(place, message.max_bytes)
    warm_up(chosen.loaded, signature, allocator.limited)
    if runs_on_csr(chosen.loaded.executor):
        narrow = takes_narrow_edges(chosen.loaded, signature, site)
        signature = msgspec.structs.replace(signature, narrow_edges=narrow)
    found = calibrate(
        chosen.loaded,
        signature,
        budget_s=message.budget_s,
        max_bytes=message.max_bytes,
        allocator=allocator,
        progress=lambda step, fraction: tell(Progress(step, fraction)),
        executor_reason=chosen.reason,
        site=site,
        trial=trial,
    )
    replaying = place.replaying(chosen.loaded, signature, site, trial)
    found = msgspec.structs.replace(
        found,
        replay_most=replaying.most,
        replay_any_size=replaying.any_size,
        replay_reason=replaying.reason,
        load_ns=load_ns,
        gather_threads=place.gather_threads(signature),
    )
    return ModelProbed(signature, msgspec.msgpack.encode(found))


def _allocator(place: Place, max_bytes: int) -> Allocator:
    meter = place.meter
    if isinstance(meter, Meter):
        return Allocator(meter.held_by, place.expect, limited_by(meter, max_bytes))
    # A device's memory has a limit of its own.
    return Allocator(None if meter is None else meter.held_by, place.expect)
