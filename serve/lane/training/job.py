"""What a training process does: it measures a step, or trains from the last checkpoint on.

It answers in messages and touches nothing but its job's folder. Between two instructions it may be
stopped for as long as requests need the core, or be killed: the last checkpoint stays.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

from serve.errors import ModelError, ServeError
from serve.ipc.job_files import JobFiles
from serve.ipc.messages import (
    EstimateStep,
    FromLane,
    JobSteps,
    JobStopped,
    JobTrained,
    MeasureStep,
    StepEstimated,
    StepMeasured,
    TrainJob,
)
from serve.lane import clock
from serve.lane.error_text import told, traced
from serve.lane.training.checkpoint import load_checkpoint, save_checkpoint, save_weights
from serve.lane.training.measure import StepFit, fit_step, graph_bytes
from serve.lane.training.stack import stack_of
from serve.lane.training.step import TrainingGraph, TrainStep, step_of
from serve.native import Meter

Send = Callable[[FromLane], None]

#: Buffers that torch's libraries take in the first step of a process and keep, at most.
_ONCE_BYTES = 1 << 20
#: Progress is told no more often.
_TELL_NS = 100_000_000


def measure_step(message: MeasureStep, meter: Meter | None) -> StepMeasured | JobStopped:
    """Find what a step needs on the job's graph, and what it takes."""
    try:
        graph = TrainingGraph.read(JobFiles(Path(message.folder)).graph)
        step = step_of(message.spec, 0.0, 0, fresh=True, executor=message.executor)
        classes = step.output(graph.inputs).shape[1]
        if classes <= int(graph.labels.max()):
            most = int(graph.labels.max())
            reason = f"the graph has a label of {most}, the model {classes} classes"
            return JobStopped("error", reason)
        fit: StepFit = fit_step(step, graph.inputs["x"].shape[1], classes, meter)
        began_ns = clock.now_ns()
        step.run(graph.inputs, graph.rows, graph.labels)
        step_ns = clock.now_ns() - began_ns
    except Exception as error:
        return _failed(error, 0, 0)
    return StepMeasured(
        held_bytes=graph.nbytes + fit.persistent_bytes,
        step_bytes=fit.step_bytes(*graph.size),
        step_ns=step_ns,
    )


def estimate_step(message: EstimateStep, meter: Meter | None) -> StepEstimated | JobStopped:
    """Estimate what a step needs on a graph of the size, from steps on small ones."""
    size = message.num_nodes, message.num_edges
    try:
        step = step_of(message.spec, 0.0, 0, fresh=True, executor=message.executor)
        fit = fit_step(step, message.num_features, message.num_classes, meter)
    except Exception as error:
        return _failed(error, 0, 0)
    kind, widths = stack_of(step.module)
    return StepEstimated(
        graph_bytes=graph_bytes(*size, message.num_features),
        persistent_bytes=fit.persistent_bytes,
        peak_bytes=int(fit.peak_bytes(*size)),
        step_bytes=fit.step_bytes(*size),
        kind=kind,
        widths=widths,
        problem=fit.problem,
    )


def train(message: TrainJob, meter: Meter | None, send: Send) -> JobTrained | JobStopped:
    """Train to the last step and leave the weights in the folder; tells progress."""
    files = JobFiles(Path(message.folder))
    limit_bytes = refused_bytes = 0
    try:
        graph = TrainingGraph.read(files.graph)
        step = step_of(
            message.spec, message.learning_rate, message.seed,
            fresh=message.fresh, executor=message.executor,
        )  # fmt: skip
        done = load_checkpoint(files.checkpoint, step)
        limit_bytes = message.step_bytes
        _train(message, files.checkpoint, graph, step, done, meter, send)
        if not math.isfinite(step.loss(graph)):
            raise _diverged(message, message.steps)
        save_weights(files.weights, step)
        return JobTrained(step.accuracy(graph))
    except Exception as error:
        if meter is not None:
            refused_bytes = meter.refused_bytes()
            meter.clear()
        return _failed(error, refused_bytes, limit_bytes)


def _train(
    message: TrainJob,
    checkpoint: Path,
    graph: TrainingGraph,
    step: TrainStep,
    done: int,
    meter: Meter | None,
    send: Send,
) -> None:
    """Do the steps that are left, each within its memory."""
    told_ns = kept_ns = clock.now_ns()
    kept = done
    took_ns = steps = 0
    once_bytes = _ONCE_BYTES
    while done < message.steps:
        began_ns = clock.now_ns()
        if meter is not None:
            # What stays is reserved besides, and the first step makes a part of it.
            meter.insert(message.step_bytes + step.state_to_come_bytes() + once_bytes)
        loss = step.run(graph.inputs, graph.rows, graph.labels)
        once_bytes = 0
        if meter is not None:
            meter.clear()
        if not math.isfinite(float(loss)):
            raise _diverged(message, done)
        done += 1
        now_ns = clock.now_ns()
        took_ns, steps = took_ns + now_ns - began_ns, steps + 1
        if now_ns - kept_ns >= message.checkpoint_s * 1e9 or done == message.steps:
            save_checkpoint(checkpoint, step, done)
            kept, kept_ns = done, now_ns
        if now_ns - told_ns >= _TELL_NS or done == message.steps:
            cpu_ns = time.process_time_ns()
            send(JobSteps(done, float(loss), took_ns // steps, kept, cpu_ns))
            told_ns, took_ns, steps = now_ns, 0, 0
        del loss


def _diverged(message: TrainJob, done: int) -> ModelError:
    rate = message.learning_rate
    return ModelError(f"the loss after {done} epochs is no number; the learning rate is {rate}")


def _failed(error: Exception, refused_bytes: int, limit_bytes: int) -> JobStopped:
    if refused_bytes:
        text = f"a tensor of {refused_bytes} bytes would pass the limit of {limit_bytes} bytes"
        return JobStopped("out_of_memory", text)
    text = told(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return JobStopped("out_of_memory", text)
    if not isinstance(error, ServeError):
        text = f"{text}\n{traced(error)}"
    return JobStopped("error", text)
