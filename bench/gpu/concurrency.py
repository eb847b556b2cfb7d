"""Measure ways to run several tasks at once: streams, processes, priorities.

    python -m bench.gpu.concurrency [--quick] [--dry]

- throughput of the same tasks on one stream, and on 2 to 8 lanes as threads with a stream each;
- the number of lanes with the highest throughput over all of these, for `device.lanes`;
- interference: run time beside k others ÷ alone for each model and size, and how far each is from
  the one table that the server learns for all (``serve.estimate.slowdown``);
- priority: latency of a small task beside a device full of large ones, on an ordinary and on an
  urgent stream, relative to alone;
- processes: the same tasks in 1, 2 and 4 processes, with MPS where it can be started, against as
  many lanes as threads. Both run the same loop; processes have torch's own allocator.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from statistics import geometric_mean

from bench.gpu.kit import Result, Rig, graph, run, spread
from bench.gpu.lanes import Lane, at_once, kept_busy
from serve.lane.cuda.streams import UNPARTITIONED, StreamKind

#: Numbers of other tasks in the slowdown table.
OTHERS = (1, 2, 3, 5, 7)
#: Size of a task's buffer; eight of them fit.
LIMIT_BYTES = 6 << 30
#: Time until the other lanes keep the device busy.
_SETTLE_S = 0.05
SIZES = {"small": (100, 400), "medium": (2000, 20_000), "large": (20_000, 200_000)}


class Work:
    """One model's task, to be repeated."""

    def __init__(self, rig: Rig, shape: tuple[int, int], name: str = "gcn", hidden: int = 256,
                 layers: int = 8) -> None:  # fmt: skip
        self._model = rig.model(name, 128, 16, hidden, layers)
        inputs = graph(*shape, 128)
        self._inputs = inputs if rig.dry else {key: x.pin_memory() for key, x in inputs.items()}

    def once(self, lane: Lane, kind: StreamKind = StreamKind.ORDINARY) -> float:
        """Return the milliseconds of one run; call it in the lane's thread."""
        return lane.timed_ms(self._model, self._inputs, LIMIT_BYTES, kind)

    def times(self, lane: Lane, count: int, kind: StreamKind = StreamKind.ORDINARY) -> list[float]:
        """Return the milliseconds of `count` runs; call it in the lane's thread."""
        return [self.once(lane, kind) for _ in range(count)]

    def on_all(
        self, lanes: list[Lane], count: int, kind: StreamKind = StreamKind.ORDINARY
    ) -> object:
        """Run `count` times on each lane, all lanes at once."""
        return at_once((lane, partial(self.times, lane, count, kind)) for lane in lanes)

    def beside(self, lane: Lane, count: int, busy: list[Lane], others: "Work",
               kind: StreamKind = StreamKind.ORDINARY,
               their_kind: StreamKind = StreamKind.ORDINARY) -> list[float]:  # fmt: skip
        """Return the milliseconds of `count` runs while each of the busy lanes repeats `others`."""
        with kept_busy(busy, partial(others.once, kind=their_kind)):
            time.sleep(_SETTLE_S)
            return lane.call(self.times, lane, count, kind)

    def warm(self, lanes: list[Lane]) -> None:
        """Run on all streams of every lane, before anything counts."""
        for lane in lanes:
            for kind in lane.queue.kinds:
                lane.call(self.once, lane, kind)


def body(result: Result, arguments: argparse.Namespace) -> None:
    rig = Rig.open(64 << 30, dry=arguments.dry)
    lanes = rig.lanes(8)
    sizes = {"small": SIZES["small"]} if arguments.quick or arguments.dry else SIZES
    names = ("gcn",) if arguments.quick else ("gcn", "gat")
    #: Throughput ÷ that of one lane; run time beside k others ÷ alone, by model and size.
    speed_of: dict[str, list[float]] = {}
    slowdown_of: dict[int, dict[str, float]] = {others: {} for others in OTHERS}
    for name in names:
        for size, shape in sizes.items():
            key = f"{name} {size}"
            with result.part(key):
                work = Work(rig, shape, name)
                work.warm(lanes)
                measure(result, rig, key, lanes, work, speed_of)
                beside(result, key, lanes, work, slowdown_of)
                mean = {k: round(geometric_mean(v), 3) for k, v in speed_of.items()}
                best = max(mean, key=lambda name: mean[name])
                result.put("lanes", {"gain_over_one": mean, "best": best})
    with result.part("slowdown"):
        one_table(result, slowdown_of, len(names) * len(sizes))
    with result.part("priority"):
        priority(result, rig, lanes, arguments)
    if not rig.dry:
        with result.part("processes"):
            processes(result, rig, lanes)


def measure(
    result: Result, rig: Rig, key: str, lanes: list[Lane], work: Work,
    speed_of: dict[str, list[float]],
) -> None:  # fmt: skip
    """Measure the time a task on 1 to 8 lanes, sixteen tasks in all."""
    ways = {
        f"{count} lanes": partial(work.on_all, lanes[:count], 16 // count) for count in (1, 2, 4, 8)
    }
    batches = rig.in_turns_ms(ways, 3)
    times = {name: spread([ms / 16 for ms in found]) for name, found in batches.items()}
    result.put(f"ms_per_task {key}", times)
    for name, found in times.items():
        speed_of.setdefault(name, []).append(times["1 lanes"]["median"] / found["median"])


def beside(
    result: Result, key: str, lanes: list[Lane], work: Work,
    slowdown_of: dict[int, dict[str, float]],
) -> None:  # fmt: skip
    """Measure a task's time beside the same task on other lanes."""
    first, *rest = lanes
    alone = first.call(work.times, first, 10)
    base = spread(alone)["median"]
    table = {}
    for others in OTHERS:
        found = work.beside(first, 10, rest[:others], work)
        table[str(others)] = spread([t / base for t in found])
        slowdown_of[others][key] = table[str(others)]["median"]
    result.put(f"slowdown_beside {key}", {"alone_ms": spread(alone), **table})


def one_table(result: Result, slowdown_of: dict[int, dict[str, float]], wanted: int) -> None:
    """Make one table for all models and sizes; report how far off it is for each.

    The aim is reached only when all `wanted` models and sizes were measured.
    """
    table = {0: 1.0} | {k: geometric_mean(found.values()) for k, found in slowdown_of.items()}
    off = {
        f"{key} beside {others}": round(value / table[others] - 1, 3)
        for others, found in slowdown_of.items()
        for key, value in found.items()
    }
    result.put("slowdown", {"table": {str(k): round(v, 3) for k, v in table.items()}, "off": off})
    worst = max(off, key=lambda name: abs(off[name]))
    if wanted > 1:
        reached = len(off) == wanted * len(OTHERS) and abs(off[worst]) <= 0.25
        result.aim(14, reached, {worst: off[worst], "measured": len(off)})


def priority(result: Result, rig: Rig, lanes: list[Lane], arguments: argparse.Namespace) -> None:
    large_size = (500, 4000) if rig.dry or arguments.quick else SIZES["large"]
    large, small = Work(rig, large_size), Work(rig, SIZES["small"], hidden=64, layers=3)
    crowd, one = lanes[:4], lanes[4]
    large.warm(crowd)
    small.warm([one])
    found = {"alone": one.call(small.times, one, 50)}
    for kind in UNPARTITIONED:
        found[kind.value] = small.beside(one, 20 if rig.dry else 100, crowd, large, kind)
    result.put("small_beside_large_ms", {name: spread(times) for name, times in found.items()})
    alone, ordinary, urgent_ms = (spread(times)["median"] for times in found.values())
    told = {"ordinary": round(ordinary / alone, 2), "urgent": round(urgent_ms / alone, 2)}
    result.put("small_beside_large_to_alone", told)
    result.aim(12, urgent_ms <= 2 * alone, told)


#: A lane in a process of its own: the loop of those that are threads, with torch's allocator.
_CHILD = """
import sys, time
sys.path.insert(0, ".")
from bench.gpu.concurrency import SIZES, Work
from bench.gpu.kit import Rig
rig = Rig.open(0, dry=False, plain=True)
work, (lane,) = Work(rig, SIZES["medium"]), rig.lanes(1)
lane.call(work.times, lane, 10)
print("ready", flush=True)
sys.stdin.readline()
started = time.perf_counter()
lane.call(work.times, lane, 200)
print((time.perf_counter() - started) * 1e3 / 200, flush=True)
"""


def processes(result: Result, rig: Rig, lanes: list[Lane]) -> None:
    threads_ms = as_threads(result, rig, lanes)
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        paths = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }  # fmt: skip
        for path in paths.values():
            os.mkdir(path)
        environment = {**os.environ, **paths}
        said = control(environment, "", "-d")
        result.put("mps_start", said or "no word")
        try:
            processes_ms = many_at_once(result, environment)
            # Without a server, clients silently run without MPS.
            servers = control(environment, "get_server_list\n")
            result.put("mps_servers", servers or "none: MPS is off")
            if servers.strip().isdigit():
                told = {"threads_ms": threads_ms, "processes_ms": processes_ms}
                result.aim(13, threads_ms <= 1.1 * processes_ms, told)
        finally:
            control(environment, "quit\n")


def control(environment: dict[str, str], told: str, *options: str) -> str:
    """Return the answer of MPS's control program."""
    try:
        said = subprocess.run(
            ["nvidia-cuda-mps-control", *options], input=told, capture_output=True, text=True,
            timeout=20, check=False, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"off: {error}"
    return (said.stdout + said.stderr).strip()


def as_threads(result: Result, rig: Rig, lanes: list[Lane]) -> float:
    """Return the least milliseconds a task on as many lanes as there are processes."""
    work = Work(rig, SIZES["medium"])
    found = {}
    for count in (1, 2, 4):
        seconds = rig.time_s(partial(work.on_all, lanes[:count], 100), 2)
        found[f"{count} lanes"] = round(1e3 * min(seconds) / 100 / count, 3)
    result.put("threads gcn medium, ms_per_task", found)
    return min(found.values())


def many_at_once(result: Result, environment: dict[str, str]) -> float:
    """Return the least milliseconds a task in processes with weights and context of their own."""
    found, all_ms = {}, []
    for count in (1, 2, 4):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=environment,
            )
            for _ in range(count)
        ]  # fmt: skip
        try:
            for child in children:
                assert child.stdout is not None
                if child.stdout.readline() != "ready\n":
                    raise RuntimeError(f"a process of {count} has ended before it began")
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
            times = [float(child.communicate(timeout=60)[0]) for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        all_ms.append(round(max(times) / count, 3))
        found[f"{count} processes"] = {"ms_per_task_of_one": times, "all": all_ms[-1]}
    result.put("processes gcn medium, with MPS", found)
    return min(all_ms)


if __name__ == "__main__":
    run("concurrency", __doc__, body)
