"""Measure a loaded model: its memory traced, its time over sizes.

Memory takes a few hundred milliseconds whatever the budget, and longer where it is not linear;
timing takes the rest, and at least half of the budget. Both measure the work of a lane:
``LoadedModel.run`` on this process's threads, with the lane's allocator. A busy machine does not
disturb the first and, on one thread, hardly the second.
"""

import logging

import torch

from serve.estimate.calibration import (
    Calibration,
)
from serve.lane import clock
from serve.lane.measure.allocator import UNMETERED, Allocator
from serve.lane.measure.memory import measure_memory
from serve.lane.measure.probe import ModelProbe
from serve.lane.measure.timing import measure_time
from serve.lane.measure.where_measured import Processor, Site
from serve.lane.models.loader import LoadedModel
from serve.models.model_signature import Signature
from serve.progress import Progress

_log = logging.getLogger(__name__)


def calibrate(
    loaded: LoadedModel,
    signature: Signature,
    *,
    budget_s: float,
    max_bytes: int,
    allocator: Allocator = UNMETERED,
    progress: Progress | None = None,
    executor_reason: str = "",
    site: Site | None = None,
    trial: LoadedModel | None = None,
) -> Calibration:
    """Trace and time `loaded` within about `budget_s`; no graph needs more than `max_bytes`.

    `site` is where it runs, by default this process. `trial` runs each traced graph first, outside
    the budget; give it where the site would not survive a graph that the model refuses.

    Raises ModelError when the model cannot run even the smallest probe graphs.
    """
    tell = progress or (lambda step, fraction: None)
    site = site or Processor()
    budget_ns = int(budget_s * 1e9)
    stop_at_ns = clock.now_ns() + budget_ns
    tell("memory", 0.0)
    memory = measure_memory(
        loaded, signature, max_bytes=max_bytes, allocator=allocator, site=site, trial=trial
    )
    if memory.warning:
        _log.warning("model %s: %s", loaded.spec.key, memory.warning)
    tell("time", 0.2)
    stop_at_ns = max(stop_at_ns, clock.now_ns() + budget_ns // 2)
    probe = ModelProbe(loaded, signature, site, limited=allocator.limited)
    before = clock.core_ns()
    timed = measure_time(probe, memory, max_bytes, stop_at_ns, tell, allocator.expect)
    had_ns, waited_ns = (now - then for now, then in zip(clock.core_ns(), before, strict=True))
    tell("done", 1.0)
    return Calibration(
        model=loaded.spec.key,
        executor=loaded.executor,
        executor_reason=executor_reason,
        device=site.name,
        threads=torch.get_num_threads(),
        memory=memory,
        time=timed,
        busy_share=round(waited_ns / max(1, had_ns + waited_ns), 4),
    )
